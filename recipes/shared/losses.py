"""How a batch becomes a loss: objectives that recipes hand to the shared loop.

Each takes the engine and a batch and returns a scalar to differentiate, or per-sample losses to average.
Must never reduce over ranks: the loop does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.nn import functional

from launcher.errors import Problem, UserError
from launcher.plan import Plan
from recipes.shared.adapter_export import base_of
from recipes.shared.hf_config import is_encoder_decoder

Batch = dict[str, torch.Tensor]
NO_LABEL = -100  # of tokens that are not to be predicted


class Objective(Protocol):
    """What is minimised. Every rank calls the same method at the same time: both run the model's forward once."""

    def loss(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Mean over the batch, each sample by its weight; scalar."""

    def sample_losses(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Mean of each sample alone; fp32 [n]."""


class CausalLM:
    """Next-token cross-entropy in nats over the tokens that have a label: `input_ids` and `labels`, [n, length]."""

    def loss(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Mean over all labels of the batch; scalar."""
        loss: torch.Tensor = engine(**batch).loss
        return loss

    def sample_losses(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Mean over the labels of each sample; fp32 [n]."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return _means(engine(**inputs).logits[:, :-1], batch["labels"][:, 1:])


class Seq2Seq:
    """Cross-entropy in nats of what an encoder-decoder writes: `input_ids` [n, read] and `labels` [n, written].

    Labels are not shifted: the model makes the decoder's inputs of them, by its own start token.
    """

    def loss(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Mean over all labels of the batch; scalar."""
        loss: torch.Tensor = engine(**batch).loss
        return loss

    def sample_losses(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Mean over the labels of each sample; fp32 [n]."""
        return _means(engine(**batch).logits, batch["labels"])


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
        model = base_of(getattr(engine, "module", engine))
        count = len(next(iter(batch.values())))
        if not hasattr(model, "sample_losses"):
            each = [{name: value[n : n + 1] for name, value in batch.items()} for n in range(count)]
            return torch.stack([self.loss(engine, one) for one in each]).float()
        model.forward = model.sample_losses  # called by the engine, so that at stage 3 parameters are there
        try:
            found = engine(**batch)
        finally:
            del model.forward
        if not torch.is_tensor(found) or tuple(found.shape) != (count,):
            why = f"it is not one loss for each of {count} samples"
            fix = "return a tensor [samples], or leave the method out"
            raise UserError(Problem("the model's sample_losses", _shape(found), why, fix))
        return found.float()


def objective_of(plan: Plan) -> Objective:
    """What a model of this plan minimises."""
    if plan.config.model.target is not None:
        return Own()
    return Seq2Seq() if is_encoder_decoder(plan.config.model.config) else CausalLM()


def _shape(value: Any) -> str:
    return str(list(value.shape)) if torch.is_tensor(value) else type(value).__name__


def _means(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the labels of each sample; logits [n, length, vocabulary], labels [n, length]."""
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="none"
    )
    return losses.view(labels.shape).sum(dim=1) / (labels != NO_LABEL).sum(dim=1)
