"""hardware=... and hardware.file -> what a device, its host and the links between them can do.

Called by the rule that judges these options, and when a plan is built.
Must never fill in a number: what is not given is None, and a time that needs it is not estimated.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem
from launcher.schema import HardwareSection

NUMBERS = (
    *("memory_bytes", "bf16_flops_per_s", "fp32_flops_per_s", "memory_bytes_per_s", "node_bytes_per_s"),
    *("network_bytes_per_s", "pcie_bytes_per_s", "host_memory_bytes_per_s", "disk_bytes_per_s"),
)


@dataclass(frozen=True)
class Hardware:
    """Bytes, and bytes or operations a second, as `HardwareSection` describes them."""

    memory_bytes: int | None
    bf16_flops_per_s: float | None
    fp32_flops_per_s: float | None
    memory_bytes_per_s: float | None
    node_bytes_per_s: float | None
    network_bytes_per_s: float | None
    pcie_bytes_per_s: float | None
    host_memory_bytes_per_s: float | None
    disk_bytes_per_s: float | None


def read(section: HardwareSection) -> Hardware:
    """The options, with the file's numbers before them. Call it on a request in which `problems` finds nothing."""
    given = Hardware(
        memory_bytes=section.memory_bytes,
        bf16_flops_per_s=section.bf16_flops_per_s,
        fp32_flops_per_s=section.fp32_flops_per_s,
        memory_bytes_per_s=section.memory_bytes_per_s,
        node_bytes_per_s=section.node_bytes_per_s,
        network_bytes_per_s=section.network_bytes_per_s,
        pcie_bytes_per_s=section.pcie_bytes_per_s,
        host_memory_bytes_per_s=section.host_memory_bytes_per_s,
        disk_bytes_per_s=section.disk_bytes_per_s,
    )
    if section.file is None:
        return given
    measured = json.loads(Path(section.file).read_text(encoding="utf-8"))
    known = {name: value for name, value in measured.items() if value is not None and name in NUMBERS}
    return dataclasses.replace(given, **known)


def problems(section: HardwareSection) -> list[Problem]:
    """What is wrong with the options: a file that is no object of numbers, or a number that is not above 0."""
    found = []
    given = {f"hardware.{name}": getattr(section, name) for name in NUMBERS}
    if section.file is not None:
        try:
            measured = json.loads(Path(section.file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return [Problem("hardware.file", section.file, f"it cannot be read: {error}", "give a JSON file")]
        if not isinstance(measured, dict) or not any(name in measured for name in NUMBERS):
            fix = f"give an object with any of {', '.join(NUMBERS)}"
            return [Problem("hardware.file", section.file, "it holds none of the numbers", fix)]
        given |= {f"{section.file}: {name}": measured.get(name) for name in NUMBERS}
    for where, value in given.items():
        if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
            found.append(Problem(where, repr(value), "not a number above 0", "give one, or null where it is not known"))
    return found
