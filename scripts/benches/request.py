"""Words behind a bench's name -> its own options, and overrides for launch.py.

Used by `benches.main` and by every bench.
Must never interpret an override: launch.py does, and refuses what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class BenchError(Exception):
    """Nothing could be measured: the request is wrong, a process failed, or the two sides differ."""


@dataclass(frozen=True)
class Request:
    """One bench's request. `options`: every option of the bench; `overrides`: the words that are not one."""

    options: dict[str, int]
    overrides: list[str]


def parse(words: list[str], defaults: Mapping[str, int]) -> Request:
    """Takes the bench's own options (whole numbers, at least 0) out of `words`; the rest are overrides."""
    options, overrides = dict(defaults), []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals and not word.startswith("~"):
            raise BenchError(f"{word!r} is no key=value; its own options: {', '.join(defaults)}")
        if name not in defaults:
            overrides.append(word)
        elif value.isdecimal():
            options[name] = int(value)
        else:
            raise BenchError(f"{name} is a whole number, not {value!r}")
    if options.get("pairs") == 0:
        raise BenchError("pairs is at least 1")
    return Request(options, overrides)


def with_defaults(defaults: list[str], overrides: list[str]) -> list[str]:
    """`overrides` behind those of `defaults` whose key they do not set."""
    given = {_key(word) for word in overrides}
    return [word for word in defaults if _key(word) not in given] + overrides


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
