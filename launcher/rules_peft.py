"""Rules about peft: which adapter is trained, and whether its library is there.

One function each, listed in `launcher.rules`; `missing_package` is asked when a plan is built.
Must never warn: what cannot be honoured is refused with its fix.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from launcher.cluster.value import Cluster
from launcher.errors import Problem
from launcher.schema import RunConfig

ALL_LINEAR = "all-linear"


def missing_package(config: RunConfig) -> Problem | None:
    """An adapter is made by PEFT, an optional package: every rank would stop without it."""
    if config.peft.kind != "lora":
        return None
    from importlib.util import find_spec  # does not import it

    if find_spec("peft") is not None:
        return None
    why = "it needs the package peft, which is not installed beside this launcher"
    return Problem("peft", "lora", why, "pip install -e '.[lora]' on every host")


def peft_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.peft.kind in ("none", "lora"):
        return None
    return Problem("peft.kind", config.peft.kind, "not an adapter", "use peft=none or peft=lora")


def peft_options_need_lora(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """With peft=none nothing reads them."""
    if config.peft.kind != "none":
        return []
    return [
        Problem(f"peft.{name}", str(value), "no adapter is chosen, so it would be ignored", "add peft=lora")
        for name, value in dataclasses.asdict(config.peft).items()
        if name != "kind" and value not in (None, [])
    ]


def lora_is_sound(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """Every option of the adapter has a value that makes one."""
    peft, found = config.peft, []
    if peft.kind != "lora":
        return []
    for name, value in (("rank", peft.rank), ("alpha", peft.alpha)):
        if value is None or value < 1:
            found.append(Problem(f"peft.{name}", str(value), "it is at least 1", f"peft.{name}=16"))
    if peft.dropout is None or not 0 <= peft.dropout < 1:
        found.append(Problem("peft.dropout", str(peft.dropout), "it is at least 0 and below 1", "peft.dropout=0.0"))
    if not peft.target:
        found.append(Problem("peft.target", "[]", "no layer would be adapted", f"peft.target=[{ALL_LINEAR}]"))
    if ALL_LINEAR in peft.target and len(peft.target) > 1:
        why = "all linear layers are meant already, and names beside that would be ignored"
        found.append(Problem("peft.target", str(peft.target), why, f"peft.target=[{ALL_LINEAR}]"))
    return found
