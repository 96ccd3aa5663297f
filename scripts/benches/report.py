"""Measured values -> rows: median, least and greatest, beside the bound, with all that another needs to repeat them.

Used by every bench (`Row`) and by `benches.main` (the table, the circumstances).
Must never round what goes into JSON, nor write a path or a name of this machine into it.
"""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import statistics
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from launcher.plan import installed_versions

ROOT = Path(__file__).resolve().parent.parent.parent
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One figure. `values`: one per pair; `parts`: what they were made of, same order; a bound is on the median."""

    what: str
    unit: str
    values: list[float]
    at_most: float | None = None
    at_least: float | None = None
    parts: dict[str, list[float]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Median of `values`."""
        return statistics.median(self.values)

    @property
    def holds(self) -> bool:
        """Whether the median is within every bound."""
        above = self.at_least is not None and self.median < self.at_least
        below = self.at_most is not None and self.median > self.at_most
        return not (above or below)

    @property
    def bound(self) -> str:
        """The bound in words."""
        words = [f"at most {self.at_most}"] if self.at_most is not None else []
        words += [f"at least {self.at_least}"] if self.at_least is not None else []
        return ", ".join(words) or "none"

    def to_json(self) -> dict[str, Any]:
        """Every field and what follows from it."""
        return {
            "what": self.what,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "bound": self.bound,
            "holds": self.holds,
            "values": self.values,
            "parts": self.parts,
        }


def ratios(above: list[float], below: list[float]) -> list[float]:
    """above / below, pair by pair."""
    return [top / bottom for top, bottom in zip(above, below, strict=True)]


def table(rows: list[Row]) -> str:
    """Rows as aligned text; under each the median of every part."""
    lines: list[tuple[str, ...]] = [("what", "unit", "median", "min", "max", "bound", "")]
    for row in rows:
        figures = [f"{value:.4g}" for value in (row.median, min(row.values), max(row.values))]
        lines.append((row.what, row.unit, *figures, row.bound, "holds" if row.holds else "MISSED"))
        for name, values in row.parts.items():
            figures = [f"{value:.4g}" for value in (statistics.median(values), min(values), max(values))]
            lines.append((f"  {name}", "", *figures, "", ""))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def circumstances(command: str, machine: dict[str, Any]) -> dict[str, Any]:
    """What a number needs beside it: when, by which command, from which revision, on what."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "revision": _git("rev-parse", "--short=12", "HEAD"),
        "changed_files": len((_git("status", "--porcelain") or "").splitlines()),
        "versions": {"python": platform.python_version()} | installed_versions(),
        "hardware": machine,
    }


def hardware() -> dict[str, Any]:
    """This machine: CPU model and cores, RAM, accelerators, and how busy it is (1-minute load average)."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "accelerators": _accelerators(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _accelerators() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    answer = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return answer.stdout.split("\n")[:-1] if answer.returncode == 0 else []


def _git(*arguments: str) -> str | None:
    answer = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return answer.stdout.rstrip() if answer.returncode == 0 else None
