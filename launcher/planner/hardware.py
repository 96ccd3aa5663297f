"""hardware=... and hardware.file -> what a device, its host and the links between them can do.

Called by the rule that judges these options, and when a plan is built.
Must never fill in a number: what is not given is None, and a time that needs it is not estimated.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from launcher.errors import Problem
from launcher.schema import HardwareSection

VERSION = 1  # of what recipe=profile writes; a file by hand needs none
NUMBERS = (
    *("memory_bytes", "bf16_flops_per_s", "fp32_flops_per_s", "memory_bytes_per_s", "node_bytes_per_s"),
    *("network_bytes_per_s", "pcie_bytes_per_s", "host_memory_bytes_per_s", "disk_bytes_per_s"),
)
CONTEXT, SHARES = "context_bytes", ("fragmentation", "utilisation")
KNOWN = (*NUMBERS, CONTEXT, *SHARES)


def read(section: HardwareSection) -> HardwareSection:
    """The options, with the file's numbers before them. Call it on a request in which `problems` finds nothing."""
    if section.file is None:
        return section
    measured = numbers(json.loads(Path(section.file).read_text(encoding="utf-8")))
    known = {name: value for name, value in measured.items() if value is not None and name in KNOWN}
    return dataclasses.replace(section, **known)


def numbers(content: Any) -> dict[str, Any]:
    """The numbers in a file: an object of them, as recipe=profile writes it, or what mode=check prints as JSON."""
    if isinstance(content, dict) and isinstance(content.get("measured"), dict):
        content = content["measured"].get("hardware")
    return content if isinstance(content, dict) else {}


def problems(section: HardwareSection) -> list[Problem]:
    """What is wrong with the options: a file that is no object of numbers, or a number out of its range."""
    given = {f"hardware.{name}": getattr(section, name) for name in KNOWN}
    if section.file is not None:
        try:
            content = json.loads(Path(section.file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return [Problem("hardware.file", section.file, f"it cannot be read: {error}", "give a JSON file")]
        measured = numbers(content)
        if measured.get("version", VERSION) != VERSION:
            got = f"{section.file}: version {measured['version']!r}"
            why = f"this product reads version {VERSION}"
            return [Problem("hardware.file", got, why, "measure again: recipe=profile, on that hardware")]
        if not any(name in measured for name in KNOWN):
            fix = f"give an object with any of {', '.join(KNOWN)}"
            return [Problem("hardware.file", section.file, "it holds none of the numbers", fix)]
        given |= {f"{section.file}: {name}": measured.get(name) for name in KNOWN}
    found = [_judged(where, value) for where, value in given.items() if value is not None]
    return [problem for problem in found if problem is not None]


def _judged(where: str, value: Any) -> Problem | None:
    name, number = where.rpartition(".")[2].rpartition(" ")[2], type(value) in (int, float)
    if name in SHARES:
        low = name == "fragmentation"
        if number and (0 <= value < 1 if low else 0 < value <= 1):
            return None
        return Problem(where, repr(value), "not a share", f"give {'0 or more, below 1' if low else 'above 0, up to 1'}")
    if name == CONTEXT:
        if number and 0 <= value < math.inf:
            return None
        return Problem(where, repr(value), "not a number of bytes", "give 0 or more, or null where it is not known")
    if number and 0 < value < math.inf:
        return None
    return Problem(where, repr(value), "not a number above 0", "give one, or null where it is not known")
