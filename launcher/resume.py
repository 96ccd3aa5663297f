"""What may not change when a run is continued: compares the stored request and checkpoint with what is asked now.

Called by `launcher.cli` before a resumed run is planned and started. Pure.
Must never let another experiment, or a layout the checkpoint cannot be loaded into, through in silence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from launcher.batch import Batch
from launcher.errors import Problem
from launcher.plan import Plan
from launcher.rules_optimizer import LAID_OUT_ANEW
from launcher.schema import RunConfig

# A change of these would make it another experiment.
FIXED = ("model", "parameters", "peft", "data", "train.sequence_length", "run.seed", "deepspeed.optimizer.type")
BATCH_OPTIONS = ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")
OFFLOADED = ("optimizer", "param")
NOT_CONTENT = ("data.cache_dir", "model.name")


def changed_options(stored: RunConfig, wanted: RunConfig) -> list[Problem]:
    """One problem for each option that has to stay and does not."""
    problems = []
    old, new = _flatten(dataclasses.asdict(stored)), _flatten(dataclasses.asdict(wanted))
    for path in sorted(old.keys() | new.keys()):
        fixed = any(path == name or path.startswith(name + ".") for name in FIXED)
        if fixed and path not in NOT_CONTENT and old.get(path) != new.get(path):
            problems.append(
                Problem(
                    path,
                    f"{new.get(path)!r}, the run has {old.get(path)!r}",
                    "a resumed run keeps its model, parameter groups, adapter, data, seed and optimizer",
                    "leave it out, or start a new run",
                )
            )
    return problems


def rebatched(config: RunConfig, old: Batch, world_size: int, old_world_size: int, typed: set[str]) -> RunConfig:
    """The request with the run's global batch, whatever else changes, unless this command line names another.

    `typed`: options of this command line. Of micro batch and accumulation the one that is named stands and the other
    is solved. With neither, on another world size, the micro batch is kept where it divides, else it is the largest
    smaller one that does.
    """
    micro, passes, total = (f"train.{name}" in typed for name in BATCH_OPTIONS)
    train, target = config.train, old.global_batch_size
    if total:
        kept: dict[str, Any] = {"micro_batch_size": train.micro_batch_size if micro or not passes else None}
        kept["gradient_accumulation_steps"] = train.gradient_accumulation_steps if passes else None
        return dataclasses.replace(config, train=dataclasses.replace(train, **kept))
    if micro and passes:
        return dataclasses.replace(config, train=dataclasses.replace(train, global_batch_size=None))
    solved: dict[str, Any]
    if micro:
        solved = {"micro_batch_size": train.micro_batch_size, "gradient_accumulation_steps": None}
    elif passes:
        solved = {"micro_batch_size": None, "gradient_accumulation_steps": train.gradient_accumulation_steps}
    elif world_size == old_world_size:
        return config
    else:
        per_rank = target // world_size
        fits = [size for size in range(1, old.micro_batch_size + 1) if per_rank and per_rank % size == 0]
        solved = {"micro_batch_size": (fits or [old.micro_batch_size])[-1], "gradient_accumulation_steps": None}
    return dataclasses.replace(config, train=dataclasses.replace(train, global_batch_size=target, **solved))


def changed_layout(plan: Plan, manifest: dict[str, Any]) -> list[Problem]:
    """Why the checkpoint cannot be laid out as the plan wants it, and a problem for a finished run."""
    wanted = {
        "world size": (manifest["world_size"], plan.world_size, "cluster.num_procs or the hosts"),
        "ZeRO stage": (manifest["zero_stage"], plan.zero_stage, "zero"),
        "precision": (manifest["precision"], plan.precision, "precision"),
        "gradient accumulation in": (manifest["accumulation"], plan.accumulation, "data_types.grad_accum_dtype"),
        "optimizer offload": (manifest["offload_optimizer"], plan.offload_device("optimizer"), "offload"),
        "parameter offload": (manifest["offload_param"], plan.offload_device("param"), "offload"),
    }
    changed = {name: values for name, values in wanted.items() if values[0] != values[1]}
    optimizer = str(plan.deepspeed.get("optimizer", {}).get("type")).lower()
    why = None
    if "nvme" in (manifest["offload_optimizer"], manifest["offload_param"], *map(plan.offload_device, OFFLOADED)):
        why = "state in swap files fits only the ranks that wrote them"
    elif optimizer not in LAID_OUT_ANEW:
        why = f"the state of {optimizer} is not of the parameters' shapes"
    elif "bf16" in (manifest["precision"], plan.precision) and _accumulates_whole(plan, manifest):
        why = "bf16 at stage 1 with fp32 accumulation keeps its state in a form of its own"
    problems = [
        Problem(option, f"{name} {new}, the checkpoint has {old}", why, f"resume with {name} {old}")
        for name, (old, new, option) in changed.items()
        if why is not None
    ]
    if manifest["step"] >= plan.config.run.steps:
        done, steps = manifest["step"], plan.config.run.steps
        why = f"the newest checkpoint is already at step {done}: there is nothing left to do"
        problems.append(Problem("run.steps", str(steps), why, f"run.steps={2 * done}, or any number above {done}"))
    return problems


def _accumulates_whole(plan: Plan, manifest: dict[str, Any]) -> bool:
    """Whether DeepSpeed runs BF16_Optimizer on either side."""
    mine = (plan.zero_stage, plan.precision, plan.accumulation, plan.offload_device("optimizer"))
    theirs = tuple(manifest[key] for key in ("zero_stage", "precision", "accumulation", "offload_optimizer"))
    return (1, "bf16", "fp32", None) in (mine, theirs)


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat
