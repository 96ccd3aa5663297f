"""How far this process's anonymous memory grows while something runs: heap and private maps, no file's pages.

Used by benches, within ranks and over the processes they start.
Must never count memory that the kernel could drop: mapped files are left out.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import TracebackType

import psutil

POLL_S = 0.005


class PeakMemory:
    """Context: `grown_bytes` is the most by which anonymous memory exceeded what it was at the start."""

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = anonymous_bytes()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.done.set()
        self.thread.join()
        self._look()

    @property
    def grown_bytes(self) -> int:
        """Peak less what there was before."""
        return self.peak - self.before

    def _watch(self) -> None:
        while not self.done.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        self.peak = max(self.peak, anonymous_bytes())


class ChildMemory:
    """Context: `peak_bytes`, the most anonymous memory that one process below this one had."""

    def __enter__(self) -> ChildMemory:
        self.peak_bytes, self.done = 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()

    def _watch(self) -> None:
        top = psutil.Process()
        while not self.done.wait(POLL_S):
            for child in top.children(recursive=True):
                self.peak_bytes = max(self.peak_bytes, anonymous_bytes(child.pid))


def anonymous_bytes(pid: int | str = "self") -> int:
    """RssAnon of a process; 0 of one that has ended."""
    try:
        lines = Path("/proc", str(pid), "status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def trim() -> None:
    """Gives the kernel back what was freed: otherwise what runs next takes it again, and seems to take nothing."""
    ctypes.CDLL(None).malloc_trim(0)
