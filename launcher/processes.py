"""Whether a process of this machine lives, and whether it is still the one that was meant.

Used by `launcher.watchdog`, `leftovers` and `marks`; the watch of a rank has its own reading of the same file.
Must never take a zombie for a process that lives.
"""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int) -> str | None:
    """When process `pid` was started, in clock ticks since boot; None when there is no live one of that number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
