"""Rules about the planner's own options: what mode=plan is asked to show, and what may be left to choose.

One function each, listed in `launcher.rules`. Must never warn: what cannot be honoured is refused with its fix.
"""

from __future__ import annotations

from typing import Any

from launcher.cluster.value import Cluster
from launcher.errors import Problem
from launcher.schema import RunConfig


def displays_need_their_mode(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """Only mode=plan shows them."""
    if config.mode == "plan":
        return []
    asked = {"compare": config.plan.compare, "scale": config.plan.scale, "html": config.plan.html}
    why = f"mode={config.mode} does not read it"
    return [
        Problem(f"plan.{name}", str(value), why, "add mode=plan, or leave it out")
        for name, value in asked.items()
        if value
    ]


def planned_amounts_are_positive(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """A cluster has a rank, and a device some memory."""
    found = []
    if any(ranks < 1 for ranks in config.plan.scale):
        found.append(Problem("plan.scale", str(config.plan.scale), "a run has a rank at least", "plan.scale=1,2,4"))
    if config.plan.memory_bytes is not None and config.plan.memory_bytes < 1:
        given, fix = str(config.plan.memory_bytes), "plan.memory_bytes=80000000000, or leave it out"
        found.append(Problem("plan.memory_bytes", given, "it is the memory of a device, in bytes", fix))
    return found


def checkpointing_is_chosen(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """`auto` is chosen before a request is judged; any other word is none."""
    if isinstance(config.activation.checkpointing, bool):
        return None
    got, fix = config.activation.checkpointing, "use activation=none, activation=full or activation=auto"
    return Problem("activation.checkpointing", got, "neither true nor false", fix)
