"""Makes a corpus from the Python standard library's own sources: text that every machine already has.

Called by `build` for data.kind=stdlib, the default data.
Must never read what differs between machines of one Python version: tests, site-packages, build settings.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.errors import Problem, UserError, raise_if
from recipes.shared.data.files import check_fraction, hold_out, path_hash, stamp
from recipes.shared.data.meta import DataMeta
from recipes.shared.data.writer import Piece, write_corpus

# Distributions leave the test folders out, or not; the others hold what was installed or generated on the machine.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "lib-dynload"}
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


class StdlibSource:
    """The options of conf/data/stdlib.yaml."""

    def __init__(self, *, max_bytes: int, validation_fraction: float) -> None:
        """Raises: UserError for a bad option or when there are fewer than two source files."""
        problems: list[Problem] = []
        check_fraction(validation_fraction, problems)
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
            why = "it is a number of bytes, without a unit"
            problems.append(Problem("data.max_bytes", repr(max_bytes), why, "data.max_bytes=8000000"))
        raise_if(problems)
        self.fraction = validation_fraction
        self.root = Path(sysconfig.get_paths()["stdlib"])
        self.sizes = _choose(_source_files(self.root), max_bytes)
        if len(self.sizes) < 2:
            raise UserError(
                Problem(
                    where="data.max_bytes",
                    got=f"{max_bytes}: {len(self.sizes)} source files of {self.root} fit",
                    why="at least two files are needed, one to train on and one to validate on",
                    fix="data.max_bytes=8000000, or data=text data.files=[...] if this Python has no source files",
                )
            )

    def fingerprint(self) -> dict[str, Any]:
        """All that determines the tokens, without reading a file."""
        return {
            "validation_fraction": self.fraction,
            "files": [(name, *stamp([self.root / name])[0][1:]) for name in self.sizes],
        }

    def write(self, folder: Path) -> DataMeta:
        """Writes both splits into `folder`; each file is a document of one byte per token."""
        held = hold_out(self.sizes, self.fraction)
        source = (
            f"{len(self.sizes)} source files of the Python {platform.python_version()} standard library as bytes, "
            f"{len(held)} held out whole for validation"
        )
        return write_corpus(self._pieces(held), folder, None, source)

    def _pieces(self, held: set[str]) -> Iterator[Piece]:
        for name in self.sizes:
            yield Piece("validation" if name in held else "train", (self.root / name).read_bytes(), last=True)


def _source_files(root: Path) -> dict[str, int]:
    """Relative name -> bytes of every non-empty source file."""
    sizes: dict[str, int] = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and _is_general(name)]
        for name in names:
            if name.endswith(".py") and _is_general(name):
                path = Path(folder, name)
                sizes[path.relative_to(root).as_posix()] = path.stat().st_size
    return {name: size for name, size in sizes.items() if size}


def _is_general(name: str) -> bool:
    return not name.startswith(SKIPPED_PREFIXES)


def _choose(sizes: dict[str, int], max_bytes: int) -> dict[str, int]:
    """Whole files in the order of their name's hash, as many as fit: a cap takes a cross-section, not a to m."""
    chosen: dict[str, int] = {}
    room = max_bytes
    for name in sorted(sizes, key=path_hash):
        if sizes[name] <= room:
            chosen[name] = sizes[name]
            room -= sizes[name]
    return chosen
