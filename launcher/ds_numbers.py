"""A number as a user writes it -> its exact value: `5e8`, "500M", "64MiB", "500_000_000".

Used by `ds_values`, which knows the key and its limits. Must never round, and never guess what a suffix means.

- k, M, G, T multiply by 10^3, 10^6, 10^9, 10^12, in either case; B is a billion (2B parameters), as G is;
- Ki, Mi, Gi, Ti multiply by 2^10, 2^20, 2^30, 2^40;
- a small m is refused: it could be milli;
- sizes in bytes take B, kB, MB, GB, TB and KiB, MiB, GiB, TiB; a bare M is refused there: it could be MB or MiB.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
COUNTS = {letter.lower(): factor for letter, factor in DECIMAL.items()} | {"b": 10**9}
BYTES = {"B": 1} | {f"{letter}B": factor for letter, factor in (DECIMAL | BINARY).items()}
# Four digits of exponent are beyond any float, and keep the arithmetic short.
NUMBER = re.compile(r"([+-]?(?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?) ?([a-zA-Z]*)")


class Unfit(ValueError):
    """A value that a key cannot hold: why, what to do, and where inside a list it lies ("[0]")."""

    def __init__(self, why: str, fix: str, at: str = "") -> None:
        super().__init__(why)
        self.why, self.fix, self.at = why, fix, at


def number(value: Any, unit: str, expected: str, example: str) -> int | float | Decimal:
    """The finite number that `value` is or spells, counted in `unit`.

    Raises Unfit: `expected` says in words what the key holds, `example` how to write it.
    """
    if isinstance(value, bool):
        raise Unfit(f"a boolean, where {expected} stands", example)
    if isinstance(value, (int, float)):
        if isinstance(value, float) and not math.isfinite(value):
            raise Unfit(f"not finite, where {expected} stands", example)
        return value
    match = NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise Unfit(f"not a number, where {expected} stands", example)
    return Decimal(match[1].replace("_", "")) * multiple(match[2], unit, example)


def multiple(suffix: str, unit: str, example: str) -> int:
    """What the letters behind a number multiply it with."""
    if not suffix:
        return 1
    if suffix in BINARY:
        return BINARY[suffix]
    if suffix == "m":
        raise Unfit("a small m could be milli or a million", "write M for a million")
    if unit == "bytes":
        if suffix in BYTES:
            return BYTES[suffix]
        letter = suffix.removesuffix("B").upper()
        if letter in ("K", "M", "G", "T"):
            both = f"{'k' if letter == 'K' else letter}B for a power of ten, {letter}iB for a power of two"
            raise Unfit(f"{suffix} can be read two ways for a size in bytes", f"write {both}")
    elif suffix.lower() in COUNTS:
        return COUNTS[suffix.lower()]
    elif suffix in BYTES:
        raise Unfit(f"bytes, where DeepSpeed counts {unit or 'no bytes'}", example)
    raise Unfit(f"{suffix!r} behind a number means nothing", "k, M, G (or B) and T multiply by 10^3, 10^6, 10^9, 10^12")
