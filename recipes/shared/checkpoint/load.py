"""Restores the training state from the checkpoint that the plan names.

Called by recipes on every rank after the engine stands.
Must never go on from initial weights when a checkpoint was asked for.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launcher.errors import Problem, UserError
from recipes.shared.checkpoint import manifest
from recipes.shared.checkpoint.adam import replay_bias_correction
from recipes.shared.checkpoint.save import rng_name
from recipes.shared.distributed import say
from recipes.shared.state import TrainState


def restore(state: TrainState) -> None:
    """Loads weights, optimizer, schedule, generators and position; does nothing for a new run. All ranks."""
    if state.plan.resume_from is None:
        return
    folder = Path(state.plan.resume_from)
    say(state.run, f"loading {folder.name}")
    saved = manifest.read(folder)
    loaded, _ = state.engine.load_checkpoint(str(folder.parent), tag=folder.name) if saved else (None, None)
    if loaded is None or saved is None:
        raise UserError(
            Problem("checkpoint", str(folder), "DeepSpeed did not load it", "see this rank's log; choose an older one")
        )
    replay_bias_correction(state.engine)
    set_rng_state(torch.load(folder / rng_name(state.ranks.rank), weights_only=True))
    state.step = state.saved_step = int(saved["step"])
    state.tracker_run_id, state.tracked_as = saved["tracker_run_id"], saved["tracked_as"]
    if state.engine.global_steps != state.step:
        raise UserError(
            Problem(
                "checkpoint",
                str(folder),
                f"the engine stands at step {state.engine.global_steps}, the manifest says {state.step}",
                "choose an older checkpoint",
            )
        )


def set_rng_state(state: dict[str, Any]) -> None:
    """Inverse of `save.rng_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
