"""The temporary folder in which an export is made, and the note in it of what is done, from which it goes on.

Used by export.
Must never be written by two processes, or go on with files that were made from something else.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.errors import Problem, UserError
from launcher.rundir import read_json, write_json

PROGRESS, LOCK = "progress.json", "lock"


@contextmanager
def staging_of(target: Path) -> Iterator[Path]:
    """The temporary folder of this target, for one process at a time; an interrupted export's is taken up again."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.exporting")
    staging.mkdir(exist_ok=True)
    with (staging / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = "another export is writing it at this moment"
            raise UserError(Problem("export.dir", str(target), why, "wait, or add export.dir=ANOTHER_FOLDER")) from None
        yield staging
        (staging / LOCK).unlink(missing_ok=True)


def discard(target: Path) -> None:
    """Removes the temporary folder of this target; raises UserError when another process is writing it."""
    with staging_of(target) as staging:
        shutil.rmtree(staging)


def continued(staging: Path, wanted: dict[str, Any]) -> dict[str, dict[str, str]]:
    """{file: checksums of its tensors} of what an earlier attempt at the same finished; anything else is removed."""
    progress = read_json(staging / PROGRESS) or {}
    done = progress["done"] if progress.get("made_from") == wanted else {}
    done = {file: digests for file, digests in done.items() if (staging / file).is_file()}
    for path in staging.iterdir():
        if path.name not in (LOCK, *done):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    note(staging, wanted, done)
    return done


def note(staging: Path, wanted: dict[str, Any], done: dict[str, dict[str, str]]) -> None:
    """Notes what is `done`, and what it was made from, for an attempt that goes on with it."""
    write_json(staging / PROGRESS, {"made_from": wanted, "done": done})
