"""Whether a checkpoint fits on the disk, asked on every host before a save begins.

Called by `save`. A checkpoint is as large as the one before, or as the plan predicts.
Must never let one rank begin a save that another refuses.
"""

from __future__ import annotations

import shutil
from typing import Any

import torch
import torch.distributed as dist

from launcher.errors import Problem, UserError
from launcher.plan import Plan
from launcher.rundir import RunDir
from recipes.shared.checkpoint import manifest
from recipes.shared.distributed import Ranks


def refuse_without_room(plan: Plan, run: RunDir, ranks: Ranks) -> None:
    """Raises UserError on every rank when a host sees less free space than a checkpoint takes. All ranks."""
    sizes = torch.tensor([shutil.disk_usage(run.path).free, -_expected(plan, run)], dtype=torch.int64)
    sizes = sizes.to(ranks.device)
    dist.all_reduce(sizes, op=dist.ReduceOp.MIN)
    free, needed = int(sizes[0]), -int(sizes[1])
    if free < needed:
        why = f"a checkpoint takes {needed:,} bytes, {free:,} are free: nothing was written, the one before it is whole"
        fix = "make room or lower checkpoint.keep, then go on with recipe=resume"
        raise UserError(Problem("checkpoint", str(run.checkpoints), why, fix))


def _expected(plan: Plan, run: RunDir) -> int:
    """Bytes of a checkpoint of this layout: those of the newest there is, else the plan's; 0 where it knows none."""
    for folder in manifest.steps(run.checkpoints):
        saved: dict[str, Any] | None = manifest.read(folder)
        if saved is not None and manifest.layout(saved) == manifest.layout_of(plan):
            return int(sum(entry["bytes"] for entry in saved["files"].values()))
    return plan.estimate.checkpoint_bytes or 0
