"""How far this process's anonymous memory grows while something runs: heap and private maps, no file's pages.

Used within ranks of a bench.
Must never count memory that the kernel could drop: mapped files are left out.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

POLL_S = 0.005
STATUS = Path("/proc/self/status")


class PeakMemory:
    """Context: `grown_bytes` is the most by which anonymous memory exceeded what it was at the (last) start."""

    def __init__(self) -> None:
        self.restart()

    def __enter__(self) -> PeakMemory:
        self.restart()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.done.set()
        self.thread.join()
        self._look()

    def restart(self) -> None:
        """What there is now is what there was before."""
        self.before = self.peak = anonymous_bytes()

    @property
    def grown_bytes(self) -> int:
        """Peak less what there was before."""
        return self.peak - self.before

    def _watch(self) -> None:
        while not self.done.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell RssAnon")
