"""Ends what is left of one run on a host: a script that `launcher.remote` sends there.

Standard library only. Finds the run's processes by the path of its plan, an argument that no other job has.
Must never touch a process without that argument, and never wait for one to agree.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
from typing import Any

MARK = "@zerolaunch "


def main(request: dict[str, Any]) -> None:
    """Kills every process that has request["plan"] among its arguments; removes what the run keeps in memory."""
    killed = [pid for pid in processes_of(request["plan"]) if kill(pid)]
    for pattern in request["leftovers"]:
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                os.unlink(path)
    print(MARK + json.dumps({"killed": killed}), flush=True)


def processes_of(plan: str) -> list[int]:
    """Ranks and their node launcher: ssh and pdsh carry the path inside a longer argument and end by themselves."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                if plan.encode() in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True
