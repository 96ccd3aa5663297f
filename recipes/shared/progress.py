"""How far a job over many bytes is, on stderr: a bar for people, a line now and then for logs.

Used by export.
Must never write to stdout: a job's answer is alone there.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

LINE_EVERY_S = 5.0


class Progress:
    """`with Progress("exported", total) as progress: progress.advance(size)`, from any thread."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self.what, self.total, self.done, self.shown = what, max(total_bytes, 1), 0, time.monotonic()
        self.lock = threading.Lock()
        self.bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (f"· {self.what}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self.bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task(self.what, total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, size: int) -> None:
        """`size` more bytes are done."""
        with self.lock:
            self.done += size
            if self.bar is not None:
                self.bar.update(self.task, completed=self.done)
            elif time.monotonic() - self.shown >= LINE_EVERY_S:
                self.shown = time.monotonic()
                print(f"· {self.what} {self.done / 1e9:.3f} of {self.total / 1e9:.3f} GB", file=sys.stderr)
