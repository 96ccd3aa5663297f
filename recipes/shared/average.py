"""Engine -> an exponential moving average of its weights: each rank averages its own part of the fp32 masters.

Called by the loop on every rank. The average is a state of the optimizer beside its moments: where they go
(to the host, a checkpoint, another layout, an export), it goes too.
Must never gather a parameter.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes.shared.checkpoint.average import KEY
from recipes.shared.masters import stepping


class Average:
    """The average of what this rank has of the masters; made after a restore, which may have brought one."""

    def __init__(self, engine: Any, decay: float) -> None:
        self.engine, self.decay = engine, decay
        self.state = stepping(engine).state
        self.skipped = int(engine.skipped_steps)
        self.averages = []
        for master in _masters(engine):
            known = self.state[master].get(KEY) if master in self.state else None
            self.averages.append((master, master.detach().float().clone() if known is None else known))

    @torch.no_grad()
    def update(self) -> None:
        """average = decay x average + (1 - decay) x master, after a step; nothing after one that was skipped."""
        skipped, self.skipped = self.skipped, int(self.engine.skipped_steps)
        if self.skipped != skipped:
            return
        for master, average in self.averages:
            average.lerp_(master.detach().to(average), 1 - self.decay)
            self.state[master][KEY] = average  # not before the first step: optimizers take an empty state for a new one


def averaging(engine: Any, decay: float | None) -> Average | None:
    """The engine's average, or None where none is asked for; one that a checkpoint brought all the same is dropped."""
    if decay is not None:
        return Average(engine, decay)
    for values in stepping(engine).state.values():
        values.pop(KEY, None)
    return None


def _masters(engine: Any) -> list[torch.Tensor]:
    """This rank's flat parts of the masters; at stage 0 in fp32 the parameters themselves."""
    optimizer = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):  # stage 3, stages 1 and 2
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [parameter for group in stepping(engine).param_groups for parameter in group["params"]]
