"""Two runs at once, each stopped while the other goes on: a slow spell of the machine is shared within seconds.

Used by benches whose ratio is nearer to 1 than the speed of a machine is from one minute to the next.
Must never let two run at a time, nor leave one of them behind.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benches.timing import TIMEOUT_S, check_code, descendants, kill_tree

POLL_S = 0.05

Window = tuple[float, float]


@dataclass(frozen=True)
class Started:
    """A run that has been started, its output in `log`. `warm`: whether the steps that do not count are over."""

    process: subprocess.Popen[bytes]
    argv: list[str]
    log: Path
    warm: Callable[[], bool]

    @property
    def lives(self) -> bool:
        """Whether its process has not ended."""
        return self.process.poll() is None


def alternate(starts: Mapping[str, Callable[[], Started]], window_s: float) -> dict[str, list[Window]]:
    """Runs all to their ends; when each had the machine to itself, in seconds since the epoch.

    They are started one after the other, and take turns of `window_s` once all are warm, until one has ended. Raises
    BenchError with the last lines of one that fails.
    """
    windows: dict[str, list[Window]] = {name: [] for name in starts}
    started: dict[str, Started] = {}
    try:
        for name, start in starts.items():
            opened = time.time()
            started[name] = start()
            while started[name].lives and not started[name].warm():
                time.sleep(POLL_S)
            windows[name].append((opened, time.time()))
            _signal(started[name].process, "suspend")
        names = list(starts)
        while all(each.lives for each in started.values()):
            for name in names:
                windows[name].append(_turn(started[name].process, window_s))
            names.reverse()
        for each in started.values():
            _signal(each.process, "resume")
            check_code(each.process.wait(TIMEOUT_S), each.argv, each.log)
    finally:
        for each in started.values():
            kill_tree(each.process)
    return windows


def within(ends: list[float], windows: list[Window]) -> list[float]:
    """Seconds of each step that lies whole in one window; `ends`: when each ended, in the order of steps."""
    steps = itertools.pairwise(ends)
    return [end - begin for begin, end in steps if any(opened <= begin and end <= shut for opened, shut in windows)]


def _turn(process: subprocess.Popen[bytes], window_s: float) -> Window:
    _signal(process, "resume")
    opened = time.time()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(window_s)
    shut = time.time()
    _signal(process, "suspend")
    return opened, shut


def _signal(process: subprocess.Popen[bytes], name: str) -> None:
    """suspend or resume: the process and all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        for each in (top, *descendants(top)):
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(each, name)()
