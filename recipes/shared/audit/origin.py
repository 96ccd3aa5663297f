"""The call stack -> the line of the user's code that is answerable for what torch is asked to do.

Used by every part of the audit, on any rank.
Must never accuse anybody of what DeepSpeed or the product does with parameters on its own account.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch

_DESCRIBING = ("__repr__", "extra_repr")  # DeepSpeed prints the model; nothing depends on what is printed
USER, THROUGH, TRUSTED, LIBRARY = "user", "through", "trusted", "library"


@dataclass(frozen=True)
class Line:
    """A line of a file of the user's."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Origin:
    """Where a call comes from, and the functions of torch and the standard library that it went through."""

    line: Line | None
    through: set[str] = field(default_factory=set)


@functools.cache
def _roots() -> tuple[tuple[str, str], ...]:
    """(what a path begins with, its kind), the first that fits decides."""
    here, deepspeed_folder = Path(__file__).resolve().parent, Path(deepspeed.__file__).resolve().parent
    paths = sysconfig.get_paths()
    return (
        ("<", THROUGH),
        (str(here), THROUGH),
        (str(here.parent), TRUSTED),
        # Runs in place of torch.nn.functional.linear, and so for whoever calls that.
        (str(deepspeed_folder / "runtime" / "zero" / "linear.py"), THROUGH),
        (str(deepspeed_folder), TRUSTED),
        (str(Path(torch.__file__).resolve().parent), THROUGH),
        (paths["purelib"], LIBRARY),
        (paths["platlib"], LIBRARY),
        (paths["stdlib"], THROUGH),
    )


@functools.cache
def _kind(file: str) -> str:
    return next((kind for root, kind in _roots() if file.startswith(root)), USER)


def accused(frame: Any = None) -> Origin | None:
    """Who asked: None where DeepSpeed or the product did. A library between them and torch (a model of transformers)
    speaks for the user's line that runs it."""
    frame = frame or sys._getframe(1)
    through: set[str] = set()
    library = False
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if frame.f_code.co_name in _DESCRIBING:
            return None
        if kind == USER:
            return Origin(Line(frame.f_code.co_filename, frame.f_lineno), through)
        if kind == TRUSTED and not library:
            return None
        if kind == THROUGH:
            through.add(frame.f_code.co_name)
        library = library or kind == LIBRARY
        frame = frame.f_back
    return Origin(None, through)


def line() -> Line | None:
    """The innermost line of the user's, whoever was called by it."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if _kind(frame.f_code.co_filename) == USER:
            return Line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None
