"""The training state: what a checkpoint holds and a resume restores.

Made by recipes; the loop, metrics and checkpoints read and advance it.
Must never hold anything that could be derived from the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.plan import Plan
from launcher.rundir import RunDir
from recipes.shared.best import Best
from recipes.shared.checkpoint.background import Writer
from recipes.shared.distributed import Ranks


@dataclass
class TrainState:
    """One run in progress on this rank."""

    engine: Any
    plan: Plan
    ranks: Ranks
    run: RunDir
    step: int = 0
    """Optimizer steps taken."""
    saved_step: int | None = None
    """Step of the newest committed checkpoint of this process, or the one it was restored from."""
    base: tuple[int, int] = (0, 0)
    """Step and samples seen when this process began: the global batch may have been another before."""
    best: Best = field(default_factory=Best)
    """The best evaluation so far."""
    ended_early: bool = False
    """Whether too many evaluations in a row were no better: the run ends at this step."""
    fixed_batch_loss: Callable[[], float | None] | None = None
    """Loss on a few fixed validation samples, the same for every layout; set by the loop. All ranks."""
    writer: Writer = field(default_factory=Writer)
    """Writes checkpoints in the background."""
    writing: tuple[int, Path] | None = None
    """Step and temporary folder of the checkpoint that is being written."""
    data_digest: str | None = None
    """Of the corpus that this run reads (`DataMeta.digest`)."""
    tracker_run_id: str | None = None
    """Run at the experiment tracker; after a restore that of the checkpoint."""
    tracked_as: str | None = None
    """What that run stands for (`trackers.tracked_as`)."""

    @property
    def samples_seen(self) -> int:
        """Samples of the global order consumed so far: the next one to read."""
        step, samples = self.base
        return samples + (self.step - step) * self.plan.batch.global_batch_size
