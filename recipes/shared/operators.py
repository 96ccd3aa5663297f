"""Makes loading compiled DeepSpeed operators quick: what py-cpuinfo finds out about the CPU is kept beside them.

Called once per worker, before the engine is built.
Must never change which flags an operator is compiled with: the kept answer is py-cpuinfo's own, for this CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.rundir import read_json, write_json

NAME = "cpuinfo.json"


def remember_cpu(folder: Path) -> None:
    """Replaces `cpuinfo.get_cpu_info` by one that asks once per folder of operators.

    DeepSpeed asks twice for each operator it loads, and an answer takes 1.2 s (it starts processes). The folder is
    keyed by the CPU's feature flags, so the answer cannot be another CPU's. Not collective.
    """
    try:
        import cpuinfo  # type: ignore[import-untyped]  # it has no stubs
    except ImportError:
        return
    ask: Callable[[], dict[str, Any]] = cpuinfo.get_cpu_info
    known: dict[str, Any] = {}

    def remembered() -> dict[str, Any]:
        if not known:
            known.update(read_json(folder / NAME) or ask())
            if not (folder / NAME).exists() and folder.is_dir():
                write_json(folder / NAME, known)
        return dict(known)

    cpuinfo.get_cpu_info = remembered
