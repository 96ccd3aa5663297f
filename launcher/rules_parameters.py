"""Rules about parameter groups and frozen parameters.

One function each, listed in `launcher.rules`; a file named in a docstring is DeepSpeed 0.19.8's and shows the reason.
Must never warn: what cannot be honoured is refused with its fix.
"""

from __future__ import annotations

from typing import Any

from launcher.cluster.value import Cluster
from launcher.errors import Problem
from launcher.schema import RunConfig

SELECTING, SETTING = ("match", "max_dim"), ("weight_decay", "lr_scale")
LEAST = {"max_dim": 0, "weight_decay": 0, "lr_scale": 0}


def parameter_groups_are_sound(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """Each group says which parameters it takes and what is different for them; a weight decay needs one to differ."""
    found = []
    for number, group in enumerate(config.parameters.groups):
        where = f"parameters.groups.{number}"
        unknown = sorted(group.keys() - {*SELECTING, *SETTING})
        if unknown:
            keys = ", ".join((*SELECTING, *SETTING))
            found.append(Problem(f"{where}.{unknown[0]}", str(group[unknown[0]]), "not a key", f"keys: {keys}"))
            continue
        if not group.keys() & set(SELECTING):
            why = "it takes every parameter that is left"
            found.append(Problem(where, str(group), why, "add match: ['*.bias'] or max_dim: 1"))
        if not group.keys() & set(SETTING):
            why = "nothing is different for these parameters"
            found.append(Problem(where, str(group), why, "add weight_decay: 0.0 or lr_scale: 0.1"))
        found += [_value(f"{where}.{key}", value, key) for key, value in group.items() if not _fits(key, value)]
        for key, needed in (("weight_decay", "weight_decay"), ("lr_scale", "lr")):
            if key in group and needed not in ds.get("optimizer", {}).get("params", {}):
                why = f"the optimizer's own {needed} is not given, so there is nothing to differ from"
                fix = f"add deepspeed.optimizer.params.{needed}=VALUE"
                found.append(Problem(f"{where}.{key}", str(group[key]), why, fix))
    return found


def _fits(key: str, value: Any) -> bool:
    if key == "match":
        return isinstance(value, list) and bool(value) and all(isinstance(pattern, str) for pattern in value)
    kinds = (int,) if key == "max_dim" else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and value >= LEAST[key]


def _value(where: str, value: Any, key: str) -> Problem:
    if key == "match":
        return Problem(where, str(value), "not a list of patterns", "for example ['*.bias','*norm*']")
    kind = "a whole number" if key == "max_dim" else "a number"
    return Problem(
        where, str(value), f"not {kind} of at least {LEAST[key]}", f"{where}: {1 if key == 'max_dim' else 0.1}"
    )


def group_rates_need_a_relative_schedule(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/lr_schedules.py: a range test and a cycle write one learning rate into every group, as does a peak."""
    schedule = ds.get("scheduler", {})
    scaled = any(group.get("lr_scale", 1) != 1 for group in config.parameters.groups)
    relative = schedule.get("type") in (None, "WarmupCosineLR")
    if not scaled or relative:
        return None
    return Problem(
        "schedule",
        f"{schedule['type']} with lr_scale",
        "it writes one learning rate into every group, so lr_scale would be ignored",
        "use schedule=warmup_cosine or schedule=constant",
    )
