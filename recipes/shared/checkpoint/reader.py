"""A DeepSpeed checkpoint folder as named tensors: fp32 masters put together from the shards, one parameter at a time.

Used by export and elastic resume. Reads stages 0 to 3 of any world size without an engine; shards stay mapped until
they are read.
Must never hold more than one whole parameter, and never return one with a piece missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher.errors import Problem, UserError
from recipes.shared.checkpoint import layouts, manifest, unpickle
from recipes.shared.checkpoint.entries import BUFFER, TRAINED, Checkpoint, Entry, Piece

STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}  # runtime/zero/config.py


@dataclass(frozen=True)
class OptimizerState:
    """What the shards hold besides masters: `moments` by name, the same entries as the masters' with other elements."""

    moments: dict[str, tuple[Entry, ...]]
    step: int
    groups: list[dict[str, Any]]
    """Hyper-parameters of each parameter group as they were at the last step, its lr among them."""
    schedule: dict[str, Any] | None
    skipped_steps: int


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads the headers of every shard in `folder`. Raises UserError when one is missing or cannot be read."""
    model, states, shards = _open(folder)
    if not shards:
        return layouts.stage0(model, _trained(folder))
    stage = _number(shards[0].get("zero_stage", 1))
    if stage == 3:
        models = [model] + [unpickle.load(path) for path in states[1:]]
        trainable, frozen = layouts.stage3(model, layouts.flat3(shards)), layouts.frozen_stage3(models)
    else:
        trainable, frozen = layouts.stage12(model, layouts.flat12(shards)), layouts.frozen_whole(model)
    buffers = layouts.whole(model, set(model.get("buffer_names") or ()), BUFFER)
    return Checkpoint((*trainable, *frozen, *buffers), dict(model.get("shared_params") or {}), stage)


def open_optimizer(folder: Path) -> OptimizerState:
    """The optimizer's state of every trainable parameter. Raises UserError where it is not element by element.

    A moment is stored as the master is: flat, cut at the same places. Scalars other than the step are not kept.
    """
    model, _, shards = _open(folder)
    if not shards:
        return _state_stage0(model, _trained(folder))
    stage = _number(shards[0].get("zero_stage", 1))
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    optimizer = shards[0][key]
    if not isinstance(optimizer, dict) or "state" not in optimizer:
        raise UserError(
            Problem(str(folder), "an optimizer state of another form", "it cannot be laid out anew", "resume as it was")
        )
    masters = layouts.flat3(shards)[0] if stage == 3 else layouts.flat12(shards)[0]
    first = optimizer["state"].get(0, {})
    moments = {}
    for name in _elementwise(first, masters[0].size):
        if stage == 3:
            moments[name] = tuple(layouts.stage3(model, layouts.flat3(shards, name)))
        else:
            moments[name] = tuple(layouts.stage12(model, layouts.flat12(shards, name)))
    return _state(model, optimizer, moments, first)


def _state_stage0(model: dict[str, Any], trained: list[str]) -> OptimizerState:
    """Of stage 0: a state for each parameter, in the parameter's shape."""
    optimizer = model["optimizer"]
    names = trained or [entry.name for entry in layouts.stage0(model, []) if entry.trainable]
    order = [number for group in optimizer["param_groups"] for number in group["params"]]
    states: list[dict[str, Any]] = [optimizer["state"].get(number, {}) for number in order]
    largest = max(states, key=_most_elements, default={})  # of a parameter of one element nothing can be told
    moments = {}
    for key in _elementwise(largest, None):
        stored = [optimizer["state"][number][key] for number in order]
        moments[key] = tuple(
            Entry(name, array.shape, array.dtype, (Piece(array.reshape(-1), 0, array.size),), TRAINED)
            for name, array in zip(names, stored, strict=True)
        )
    # FusedAdam counts in the state of one parameter of a group only
    step = max((int(values.get("step", 0)) for values in optimizer["state"].values()), default=0)
    return _state(model, optimizer, moments, {"step": step})


def _state(
    model: dict[str, Any], optimizer: dict[str, Any], moments: dict[str, tuple[Entry, ...]], first: dict[str, Any]
) -> OptimizerState:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer["param_groups"]]
    step = int(first.get("step", groups[0].get("step", 0)) if groups else 0)
    return OptimizerState(moments, step, groups, model.get("lr_scheduler"), int(model.get("skipped_steps") or 0))


def _most_elements(state: dict[str, Any]) -> int:
    return max((value.size for value in state.values() if isinstance(value, np.ndarray)), default=0)


def _elementwise(state: dict[str, Any], numel: int | None) -> list[str]:
    """Names of the tensors in one parameter's optimizer state that have an element for each of the parameter's.

    A flat moment may be longer than its master: the master is saved without the padding at its end.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    return [name for name, value in tensors.items() if value.size >= (numel or 2)]


def _open(folder: Path) -> tuple[dict[str, Any], list[Path], list[dict[str, Any]]]:
    """Rank 0's model states, the files of all ranks', and every optimizer shard."""
    states = _numbered(folder, r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
    optimizers = _numbered(folder, r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
    if not states:
        raise UserError(
            Problem(str(folder), "no *_model_states.pt", "not a DeepSpeed checkpoint", "name a step_* folder")
        )
    _refuse_parallel(folder)
    model = unpickle.load(states[0])
    shards = [unpickle.load(path)["optimizer_state_dict"] for path in optimizers]
    world_size = int(model.get("dp_world_size", len(shards) or 1))
    if shards and len(shards) != world_size:
        missing = f"{len(shards)} of {world_size} optimizer shards"
        raise UserError(Problem(str(folder), missing, "shards are missing", "copy every rank's files into one folder"))
    return model, states, shards


def _refuse_parallel(folder: Path) -> None:
    """Raises UserError for files of tensor, pipeline or expert parallelism: rank 0's would be a part of a model."""
    parallel = re.compile(r"mp_rank_(?!00)\d+|expert_|^layer_\d")
    foreign = [path.name for path in folder.glob("*.pt") if parallel.search(path.name)]
    if foreign:
        why = "its parameters are split over ranks by more than ZeRO, and these files hold a part of them"
        fix = "merge it with the library that made it"
        raise UserError(Problem(str(folder), f"{min(foreign)} among {len(foreign)}", why, fix))


def _number(value: Any) -> int:
    """A ZeRO stage that may have been saved as a member of DeepSpeed's ZeroStageEnum, by its value or its name."""
    value = value.args[0] if isinstance(value, unpickle.Stub) else value
    return int(STAGES.get(value, value))


def _numbered(folder: Path, pattern: str) -> list[Path]:
    """Files whose whole name matches, ordered by the number in it."""
    found = [(re.fullmatch(pattern, path.name), path) for path in folder.iterdir()]
    matches = [(int(match[1] or 0), path) for match, path in found if match]
    return [path for _, path in sorted(matches)]


def _trained(folder: Path) -> list[str]:
    """Names of the trained parameters in the optimizer's order, where we saved it: stage 0's files lack them."""
    return [name for group in (manifest.read(folder) or {}).get("trained", []) for name in group]
