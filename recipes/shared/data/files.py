"""Makes file lists from what the user wrote: globs expanded, sizes and times stamped, whole files held out.

Called by the corpus kinds in `kinds/`.
Must never read a file's content, and never return an order that depends on the file system.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from launcher.errors import Problem

Stamp = tuple[str, int, int]  # path, size in bytes, modification time in ns


def expand(option: str, patterns: Sequence[str] | str, problems: list[Problem]) -> list[Path]:
    """Sorted absolute files that `patterns` (paths or globs, ** allowed) name, each once.

    Every pattern that names no file appends one Problem with where=`option`.
    """
    found: dict[Path, Path] = {}  # resolved -> as named: two patterns may meet in one file
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        # A path that exists is taken literally, so that names with brackets work.
        names = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        files = [Path(os.path.abspath(name)) for name in names if os.path.isfile(name)]
        if not files:
            problems.append(_nothing_found(option, pattern))
        for file in files:
            found.setdefault(file.resolve(), file)
    return sorted(found.values())


def _nothing_found(option: str, pattern: str) -> Problem:
    if os.path.isdir(pattern):
        return Problem(option, pattern, "it is a folder, and a list of files is needed", f"{option}=[{pattern}/**/*]")
    if glob.has_magic(pattern):
        why, fix = "the glob matches no file", "correct the glob; ** matches folders at any depth"
    else:
        why, fix = "the file does not exist", "correct the path; a relative one starts where the command was run"
    return Problem(option, pattern, why, fix)


def stamp(files: Iterable[Path]) -> list[Stamp]:
    """What identifies the content of `files` without reading them."""
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]


def stamp_tree(folder: Path) -> list[Stamp]:
    """The stamps of every file under `folder`, sorted."""
    return stamp(sorted(path for path in folder.rglob("*") if path.is_file()))


def path_hash(name: str) -> str:
    """A fixed pseudo-random sort key of a file's name."""
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()


def hold_out(sizes: dict[str, int], fraction: float) -> set[str]:
    """Names of the files kept whole for validation; `sizes` maps name -> bytes, at least two of them not empty.

    Files are taken in the order of their name's hash while the sum stays within fraction x total bytes; if not one
    fits, the smallest is taken. Never all of them, and the same names and sizes give the same choice anywhere.
    """
    names = sorted((name for name in sizes if sizes[name]), key=path_hash)
    assert len(names) >= 2, "one file cannot be held out whole"
    room = fraction * sum(sizes.values())
    held: set[str] = set()
    for name in names:
        if sizes[name] <= room:
            held.add(name)
            room -= sizes[name]
    return held or {min(names, key=lambda name: (sizes[name], path_hash(name)))}


def check_fraction(fraction: object, problems: list[Problem]) -> None:
    """Appends a Problem unless data.validation_fraction is a number strictly between 0 and 1."""
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
        problems.append(
            Problem(
                where="data.validation_fraction",
                got=repr(fraction),
                why="it must be a number above 0 and below 1: every run measures its loss on held-out data",
                fix="data.validation_fraction=0.05",
            )
        )


def common_names(files: Sequence[Path]) -> dict[str, Path]:
    """Name -> file, named relative to the folder they share: a corpus that was moved keeps its names."""
    if not files:
        return {}
    base = os.path.commonpath([file.parent for file in files])
    return {file.relative_to(base).as_posix(): file for file in files}
