"""What may not change when a run is continued: compares the stored request and checkpoint with what is asked now.

Called by `launcher.cli` before a resumed run is planned and started. Pure.
Must never let another experiment, or a layout the checkpoint cannot be loaded into, through in silence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from launcher.errors import Problem
from launcher.plan import Plan
from launcher.schema import RunConfig

# A change of these would make it another experiment.
FIXED = ("model", "data", "train.sequence_length", "run.seed", "deepspeed.optimizer.type")
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
                    "a resumed run keeps its model, data, seed and optimizer",
                    "leave it out, or start a new run",
                )
            )
    return problems


def changed_layout(plan: Plan, manifest: dict[str, Any]) -> list[Problem]:
    """One problem for each property of the checkpoint's layout that the plan does not share, and for a finished run."""
    wanted = {
        "world size": (manifest["world_size"], plan.world_size, "cluster.num_procs or the hosts"),
        "ZeRO stage": (manifest["zero_stage"], plan.zero_stage, "zero"),
        "precision": (manifest["precision"], plan.precision, "precision"),
        "optimizer offload": (manifest["offload_optimizer"], plan.offload_device("optimizer"), "offload"),
        "parameter offload": (manifest["offload_param"], plan.offload_device("param"), "offload"),
        "global batch": (manifest["batch"]["global"], plan.batch.global_batch_size, "train.global_batch_size"),
    }
    problems = [
        Problem(
            option,
            f"{name} {new}, the checkpoint has {old}",
            "shards fit one world size, stage, precision and offload, and the batch decides the data order",
            f"resume with {name} {old}",
        )
        for name, (old, new, option) in wanted.items()
        if old != new
    ]
    if manifest["step"] >= plan.config.run.steps:
        done, steps = manifest["step"], plan.config.run.steps
        why = f"the newest checkpoint is already at step {done}: there is nothing left to do"
        problems.append(Problem("run.steps", str(steps), why, f"run.steps={2 * done}, or any number above {done}"))
    return problems


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat
