"""Parts of a model named in the request, and the norm of each one's gradient.

Made by the loop before its first step; every rank asks for the norms between the last backward and the step.
Must never be asked for on one rank alone: gradients are gathered.
"""

from __future__ import annotations

from typing import Any

import torch

from launcher.errors import Problem, UserError
from recipes.shared import gather
from recipes.shared.groups import likes, matching


class Parts:
    """The parts of `parameters.norms`: {name: patterns of parameter names}. Raises UserError for one that is empty."""

    def __init__(self, engine: Any, patterns: dict[str, list[str]]) -> None:
        self.engine = engine
        trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        self.parts = {}
        for part, wanted in patterns.items():
            names = matching(trained, wanted)
            if not names:
                why = "no trained parameter fits"
                raise UserError(Problem(f"parameters.norms.{part}", str(wanted), why, likes(trained)))
            self.parts[part] = [trained[name] for name in names]

    def gradient_norms(self) -> dict[str, float]:
        """{part: L2 norm of its averaged gradient before clipping}; a parameter without a gradient counts 0. All ranks.

        One parameter of the part is whole at a time.
        """
        scale = float(getattr(self.engine.optimizer, "loss_scale", 1.0))
        return {part: self._norm(parameters) / scale for part, parameters in self.parts.items()}

    def _norm(self, parameters: list[torch.nn.Parameter]) -> float:
        squares = 0.0
        for parameter in parameters:
            gradient = gather.full_gradient(parameter)
            squares += 0.0 if gradient is None else float(gradient.double().square().sum())
        return float(squares**0.5)
