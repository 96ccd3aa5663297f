"""The rule on hardware=...: its numbers are numbers.

Called by `launcher.rules`. What the numbers mean is in `launcher.schema`; `planner.hardware` reads them.
Must never judge whether a number is true.
"""

from __future__ import annotations

from typing import Any

from launcher.cluster.value import Cluster
from launcher.errors import Problem
from launcher.planner import hardware
from launcher.schema import RunConfig


def hardware_is_known_or_null(config: RunConfig, cluster: Cluster, deepspeed: dict[str, Any]) -> list[Problem]:
    """Speeds and sizes above 0, and a file that holds some."""
    return hardware.problems(config.hardware)
