"""Rules about audit: what is watched, and what mode=audit reads.

One function each, listed in `launcher.rules`.
Must never warn: what cannot be honoured is refused with its fix.
"""

from __future__ import annotations

from typing import Any

from launcher.cluster.value import Cluster
from launcher.errors import Problem
from launcher.schema import RunConfig

MODES = ("off", "warn", "strict")


def audit_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.audit.mode in MODES:
        return None
    return Problem("audit.mode", config.audit.mode, "not an audit", f"use audit={' or audit='.join(MODES)}")


def audit_watches_steps(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.audit.steps >= 1:
        return None
    return Problem("audit.steps", str(config.audit.steps), "it is at least 1", "use audit=off to watch nothing")


def strict_audit_needs_stage3(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """Parameters are whole below stage 3, and nothing is watched: a run must not look as if it had been."""
    if config.audit.mode != "strict" or ds.get("zero_optimization", {}).get("stage", 0) == 3:
        return None
    why = "parameters are partitioned at stage 3 alone: nothing would be watched"
    return Problem("audit", "strict below stage 3", why, "add zero=stage3, or use audit=warn")


def audit_path_needs_its_mode(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.audit.path is None:
        return None
    why = f"mode={config.mode} reads no source files"
    return Problem("audit.path", config.audit.path, why, "add mode=audit, or leave it out")
