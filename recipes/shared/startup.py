"""Takes out of a worker's start what DeepSpeed does there and this run does not need; seconds per process.

Called once per worker, before the engine is built.
Must never change what is computed: a compiled function that is called is compiled, an operator's flags stay its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from launcher.plan import Plan
from launcher.rundir import read_json, write_json

CPU_FACTS = "cpuinfo.json"


def prepare(plan: Plan) -> None:
    """Both of the below, for this plan. Not collective."""
    if "TORCH_EXTENSIONS_DIR" in plan.env:
        remember_cpu(Path(plan.env["TORCH_EXTENSIONS_DIR"]))
    if str(plan.deepspeed.get("optimizer", {}).get("type", "")).lower() != "muon":
        compile_muon_when_called()


def remember_cpu(folder: Path) -> None:
    """Replaces `cpuinfo.get_cpu_info` by one that asks once per folder of operators.

    DeepSpeed asks twice for each operator it loads, and an answer takes 1.2 s (it starts processes). The folder is
    keyed by the CPU's feature flags, so the answer cannot be another CPU's.
    """
    try:
        import cpuinfo  # type: ignore[import-untyped]  # it has no stubs
    except ImportError:
        return
    ask: Callable[[], dict[str, Any]] = cpuinfo.get_cpu_info
    known: dict[str, Any] = {}

    def remembered() -> dict[str, Any]:
        if not known:
            known.update(read_json(folder / CPU_FACTS) or ask())
            if not (folder / CPU_FACTS).exists() and folder.is_dir():
                write_json(folder / CPU_FACTS, known)
        return dict(known)

    cpuinfo.get_cpu_info = remembered


def compile_muon_when_called() -> None:
    """Imports DeepSpeed's Muon with its `torch.compile` decorators put off until the functions are called.

    deepspeed.initialize imports them for any optimizer, and decorating alone loads the whole compiler (about 2 s).
    """
    from deepspeed.runtime import compiler

    eager = compiler.compile
    compiler.compile = lambda: _compiled_when_called
    try:
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401 - for its side effect: it is loaded now
    finally:
        compiler.compile = eager


def _compiled_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            compiled.append(torch.compile(function))
        return compiled[0](*args, **kwargs)

    return call
