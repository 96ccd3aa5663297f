"""What a user's own code may do wrong with a checkpoint, done on purpose.

Run in ranks that the engine server forks, by test_misuse.py.
Must never be right.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from launcher.plan import Plan
from launcher.rundir import RunDir
from recipes.shared import distributed
from recipes.shared.checkpoint.load import restore
from recipes.shared.checkpoint.save import save
from recipes.shared.engine import build_engine
from recipes.shared.model import build_model
from recipes.shared.state import TrainState


def _state(case: dict[str, Any]) -> TrainState:
    """An engine after one step."""
    plan = Plan.from_json(case["plan"])
    ranks = distributed.initialise(plan)
    engine = build_engine(plan, build_model(plan, ranks))
    tokens = torch.arange(16).reshape(1, 16)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    return TrainState(engine=engine, plan=plan, ranks=ranks, run=RunDir(case["run_dir"]), step=1)


def save_on_one_rank(case: dict[str, Any]) -> dict[str, Any]:
    """A callback under `if rank == 0`."""
    state = _state(case)
    if state.ranks.is_main:
        save(state, {})
    dist.barrier()
    return {}


def load_over_training(case: dict[str, Any]) -> dict[str, Any]:
    """A rollback within the process that saved."""
    restore(_state(case))
    return {}
