"""What a module of the user's own returns -> a loss: its own one, or the weighted sum of several.

Made by `objective.objective_of`; what the module has to return is said in docs/own_code.md.
Must never leave a loss out that has a weight, or take one that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from launcher.errors import Problem, UserError
from recipes.shared.adapter_export import base_of
from recipes.shared.losses import Batch, Objective


class Own:
    """What a module of the user's own returns: see `recipes.shared.own_code`."""

    def loss(self, engine: Any, batch: Batch) -> torch.Tensor:
        """The loss that its forward gives; scalar. Raises UserError where it gives none."""
        output = engine(**batch)
        found: Any = output if torch.is_tensor(output) else getattr(output, "loss", None)
        if found is None and isinstance(output, Mapping):
            found = output.get("loss")
        if not torch.is_tensor(found) or found.numel() != 1:
            got = f"a {type(output).__name__}" if found is None else f"{type(found).__name__} {_shape(found)}"
            why = "it is no scalar, nor has it a scalar `loss`"
            fix = "return the mean loss of the batch, or an object or mapping with it as `loss`"
            raise UserError(Problem("the model's forward", got, why, fix))
        return found.reshape(())

    def sample_losses(self, engine: Any, batch: Batch) -> torch.Tensor:
        """What its `sample_losses` gives, fp32 [n]; where it has none, the losses of its samples one at a time."""
        found, count = _sampled(engine, batch, self.loss), len(next(iter(batch.values())))
        if not torch.is_tensor(found) or tuple(found.shape) != (count,):
            why = f"it is not one loss for each of {count} samples"
            fix = "return a tensor [samples], or leave the method out"
            raise UserError(Problem("the model's sample_losses", _shape(found), why, fix))
        return found.float()


class Several:
    """The module's forward returns `losses`, a mapping of names to scalars, alone or as a field of what it returns."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.terms: dict[str, torch.Tensor] = {}

    def loss(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Sum of weight x loss; scalar. Raises UserError, by name, where losses and weights do not match."""
        output = engine(**batch)
        losses = output.get("losses", output) if isinstance(output, Mapping) else getattr(output, "losses", None)
        return self._weighed(losses, ())

    def sample_losses(self, engine: Any, batch: Batch) -> torch.Tensor:
        """The same of each sample, fp32 [n]; the module's `sample_losses`, if any, gives a mapping of names to [n]."""
        found = _sampled(engine, batch, self.loss)
        if torch.is_tensor(found):
            return found
        return self._weighed(found, (len(next(iter(batch.values()))),)).float()

    def _weighed(self, losses: Any, shape: tuple[int, ...]) -> torch.Tensor:
        fix = f"return a mapping with {', '.join(self.weights)}, as train.objectives has them"
        if not isinstance(losses, Mapping):
            why = f"it gives a {type(losses).__name__}, and train.objectives weighs losses by their names"
            raise UserError(Problem("the model's losses", type(losses).__name__, why, fix))
        if losses.keys() != self.weights.keys():
            odd = ", ".join(sorted(losses.keys() ^ self.weights.keys()))
            why = f"{odd}: a loss without a weight would be ignored, and so would a weight without a loss"
            raise UserError(Problem("train.objectives", str(self.weights), why, fix))
        wrong = [name for name, value in losses.items() if not torch.is_tensor(value) or tuple(value.shape) != shape]
        if wrong:
            why = f"it is not a tensor of shape {list(shape)}"
            raise UserError(Problem(f"the model's losses.{wrong[0]}", str(losses[wrong[0]]), why, fix))
        self.terms = {name: losses[name].detach() for name in self.weights}
        return torch.stack([weight * losses[name] for name, weight in self.weights.items()]).sum(dim=0)


def terms_of(objective: Objective) -> dict[str, torch.Tensor]:
    """The losses that the newest one of `objective` is the weighted sum of; none where it is one."""
    return objective.terms if isinstance(objective, Several) else {}


def _sampled(engine: Any, batch: Batch, loss: Callable[[Any, Batch], torch.Tensor]) -> Any:
    """What the module's `sample_losses` gives; where it has none, `loss` of the samples one at a time, fp32 [n]."""
    model = base_of(getattr(engine, "module", engine))
    if not hasattr(model, "sample_losses"):
        count = len(next(iter(batch.values())))
        each = [{name: value[n : n + 1] for name, value in batch.items()} for n in range(count)]
        return torch.stack([loss(engine, one) for one in each]).float()
    model.forward = model.sample_losses  # called by the engine, so that at stage 3 parameters are there
    try:
        return engine(**batch)
    finally:
        del model.forward


def _shape(value: Any) -> str:
    return str(list(value.shape)) if torch.is_tensor(value) else type(value).__name__
