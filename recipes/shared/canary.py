"""Stops a run that goes on without learning: losses that are not numbers or do not move, gradients of exactly zero.

Fed by metrics with the loss and gradient norm of every step, which are equal on all ranks. Torch-free.
Must never stop a run that only learns slowly: equal means equal in every bit.
"""

from __future__ import annotations

import math

from launcher.errors import Problem, UserError

PATIENCE = 10  # steps in a row
OVERFLOW_PATIENCE = 25  # fp16 halves its loss scale, 2 ** 16 at first, at each of them
NOT_A_NUMBER_PATIENCE = 3  # fp16 skips a step or two while its loss scale settles


class Canary:
    """Counts how many steps in a row look dead. Every rank keeps one and all raise at the same step."""

    def __init__(self) -> None:
        self.not_numbers = self.no_gradient = self.same_loss = self.overflows = self.skipped = 0
        self.last: float | None = None

    def see(self, step: int, loss: float, grad_norm: float | None, skipped: int = 0) -> None:
        """Takes one step's mean loss and gradient norm, and how many steps the engine has skipped so far.

        Raises UserError with the diagnosis when enough in a row look dead.
        """
        self.overflows = self.overflows + 1 if skipped > self.skipped else 0
        self.skipped = skipped
        if self.overflows >= OVERFLOW_PATIENCE:
            why = "fp16 gradients have overflowed for that long: DeepSpeed skips every step"
            fix = "use precision=bf16, or a smaller learning rate"
            raise UserError(_problem(step, "a skipped step", self.overflows, why, fix))
        self.not_numbers = 0 if math.isfinite(loss) else self.not_numbers + 1
        self.no_gradient = self.no_gradient + 1 if grad_norm == 0.0 else 0
        self.same_loss = self.same_loss + 1 if loss == self.last else 0
        self.last = loss
        if self.not_numbers >= NOT_A_NUMBER_PATIENCE:
            why = "the loss has not been a number for that long: the weights are lost"
            fix = "resume from the newest checkpoint with a smaller learning rate, or precision=bf16 instead of fp16"
            raise UserError(_problem(step, f"loss {loss}", self.not_numbers, why, fix))
        if self.no_gradient >= PATIENCE:
            why = "the gradient has been exactly 0 for that long: nothing is trained"
            fix = "look for weights frozen by mistake, and compare with zeropp=off and offload=none"
            raise UserError(_problem(step, "gradient norm 0.0", self.no_gradient, why, fix))
        if self.same_loss >= PATIENCE:
            why = "the loss has been the same to the last bit for that long: steps do not change the weights"
            fix = "look at the learning rate and the corpus, and compare with zeropp=off and offload=none"
            raise UserError(_problem(step, f"loss {loss}", self.same_loss, why, fix))


def _problem(step: int, got: str, count: int, why: str, fix: str) -> Problem:
    return Problem(f"step {step}", f"{got}, {count} steps in a row", why, fix)
