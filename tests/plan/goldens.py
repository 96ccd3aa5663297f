"""Committed texts that results are compared with, and the way to accept a change of them.

Used by tests of this folder; the texts lie in golden/.
Must never pass because a file is missing: that is a difference like any other.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "golden"
ACCEPT = "ZEROLAUNCH_ACCEPT"


def compare(name: str, text: str) -> None:
    """Fails with the changed lines unless `text` is the content of golden/`name`; ZEROLAUNCH_ACCEPT=1 rewrites it."""
    path = FOLDER / name
    if os.environ.get(ACCEPT) == "1":
        path.write_text(text, encoding="utf-8")
    committed = path.read_text(encoding="utf-8") if path.exists() else ""
    changed = difflib.unified_diff(committed.splitlines(), text.splitlines(), "committed", "now", lineterm="", n=1)
    assert committed == text, (
        f"golden/{name} differs:\n" + "\n".join(changed) + f"\nif that is meant: {ACCEPT}=1 pytest tests/plan"
    )
