"""Restores the training state from the checkpoint that the plan names.

Called by recipes on every rank after the engine stands.
Must never go on from initial weights when a checkpoint was asked for.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launcher.errors import Problem, UserError
from recipes.shared.best import Best
from recipes.shared.checkpoint import elastic, manifest
from recipes.shared.checkpoint.adam import replay_bias_correction
from recipes.shared.checkpoint.fixed_batch import tolerance
from recipes.shared.checkpoint.save import rng_name
from recipes.shared.distributed import say
from recipes.shared.groups import hyper_parameters
from recipes.shared.masters import stepping
from recipes.shared.model import seed_everything
from recipes.shared.state import TrainState


def restore(state: TrainState) -> None:
    """Loads weights, optimizer, schedule, generators and position; does nothing for a new run. All ranks.

    A checkpoint of the plan's own layout is loaded by DeepSpeed, bit for bit; of another one by `elastic`.
    """
    if state.plan.resume_from is None:
        return
    folder = Path(state.plan.resume_from)
    if state.engine.global_steps:
        why = (
            f"this engine has trained {state.engine.global_steps} steps, and at stage 3 DeepSpeed cannot load over that"
        )
        raise UserError(Problem("checkpoint", str(folder), why, "end this process and continue with recipe=resume"))
    saved = manifest.read(folder)
    if saved is None:
        raise UserError(Problem("checkpoint", str(folder), "it has no manifest", "choose an older one"))
    _refuse_other_data(state, folder, saved.get("data_digest"))
    elastic.refuse_missing(state.engine.module, set(saved["parameters"]), folder)
    same = manifest.layout(saved) == manifest.layout_of(state.plan)
    say(state.run, f"loading {folder.name}" if same else f"loading {folder.name} into another layout")
    if same:
        loaded, _ = state.engine.load_checkpoint(str(folder.parent), tag=folder.name)
        if loaded is None:
            why = "DeepSpeed did not load it"
            raise UserError(Problem("checkpoint", str(folder), why, "see this rank's log; choose an older one"))
        set_rng_state(torch.load(folder / rng_name(state.ranks.rank), weights_only=True))
        _check_step(state, folder, int(saved["step"]))
    else:
        elastic.load(state, folder)
        state.engine.global_steps = int(saved["step"])
        state.engine.global_samples = int(saved["samples_seen"])
        state.engine.micro_steps = int(saved["step"]) * state.plan.batch.gradient_accumulation_steps
        # Generators belong to ranks that no longer are the same: those of dropout start anew from the seed and step.
        seed_everything(state.plan.config.run.seed + 1 + state.ranks.rank + 1_000_003 * int(saved["step"]))
    _apply_hyper_parameters(state)
    replay_bias_correction(state.engine)
    state.step = state.saved_step = int(saved["step"])
    state.base = (state.step, int(saved["samples_seen"]))
    state.tracker_run_id, state.tracked_as = saved["tracker_run_id"], saved["tracked_as"]
    state.best = Best(**saved.get("best") or {})


def check_fixed_batch(state: TrainState) -> None:
    """Raises UserError when the restored model's loss on the manifest's fixed batch is another. All ranks."""
    if state.plan.resume_from is None or state.fixed_batch_loss is None:
        return
    saved = manifest.read(Path(state.plan.resume_from)) or {}
    expected = saved.get("fixed_batch_loss")
    if expected is None:
        return
    found = state.fixed_batch_loss()
    if found is None or not math.isclose(found, expected, rel_tol=tolerance(saved["precision"], state.plan.precision)):
        raise UserError(
            Problem(
                "checkpoint",
                state.plan.resume_from,
                f"on the fixed batch the loss is {found}, it was {expected} when it was saved",
                "choose an older checkpoint; if it persists, the code or the libraries compute something else now",
            )
        )


def _check_step(state: TrainState, folder: Path, step: int) -> None:
    if state.engine.global_steps != step:
        raise UserError(
            Problem(
                "checkpoint",
                str(folder),
                f"the engine stands at step {state.engine.global_steps}, the manifest says {step}",
                "choose an older checkpoint",
            )
        )


def _refuse_other_data(state: TrainState, folder: Path, expected: str | None) -> None:
    """The options name the same corpus, or the launcher had refused them; its files may be others by now."""
    if None not in (expected, state.data_digest) and expected != state.data_digest:
        why = f"its files hold other samples now: the checkpoint was trained on {expected}"
        fix = "bring the files back, or start a new run with model.init_from=CHECKPOINT"
        raise UserError(Problem("data", f"{state.data_digest}", f"{folder.name}: {why}", fix))


def _apply_hyper_parameters(state: TrainState) -> None:
    """The plan's clipping, betas, eps and weight decay, and its learning rate where no schedule sets one.

    DeepSpeed lets those of the checkpoint win at stages 1 and 2, whatever is asked for.
    """
    engine, deepspeed = state.engine, state.plan.deepspeed
    wanted = dict(deepspeed.get("optimizer", {}).get("params", {}))
    names = ["betas", "eps", "weight_decay", "momentum"] + ([] if engine.lr_scheduler is not None else ["lr"])
    inner = stepping(engine)
    if "use_muon" not in inner.param_groups[0]:  # it halves every group, and has rates of its own
        own = hyper_parameters(state.plan, len(inner.param_groups))
        for group, different in zip(inner.param_groups, own, strict=True):
            for name in names:
                if name in wanted and name in group:
                    value = different.get(name, wanted[name])
                    group[name] = tuple(value) if isinstance(value, list) else value
    if "gradient_clipping" in deepspeed and hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = deepspeed["gradient_clipping"]


def set_rng_state(state: dict[str, Any]) -> None:
    """Inverse of `save.rng_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
