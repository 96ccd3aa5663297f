"""What is new in the folder of a running job: cheap enough to be asked ten times a second beside busy ranks.

Used by `launcher.supervise`.
Must never trust the times of a file alone: a shared file system may show old ones, so things are looked at anyway.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

LOOK_S = 1.0


class Changes:
    """A file whose content grows, or a folder in which files come, go and are replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sign: tuple[int, int] | None = None
        self.looked = float("-inf")

    def any(self) -> bool:
        """Whether there may be something new: it has changed, or this was last so LOOK_S ago."""
        now, sign = time.monotonic(), None
        try:
            found = os.stat(self.path)
            sign = (found.st_mtime_ns, found.st_size)
        except OSError:
            pass
        if sign == self.sign and now - self.looked < LOOK_S:
            return False
        self.sign, self.looked = sign, now
        return True


class Tail:
    """New complete lines of a growing file, as JSON values."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """Objects appended since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]
