"""A name that is no key where it stands -> what was meant: the nearest legal key here or elsewhere, or an old name.

Called by `ds_check` for every unknown key. Must never decide whether a key is legal: it finds words for the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache

from launcher.ds_schema import ROOT, Level, Refusal, lookup, schema, unshaped
from launcher.ds_values import either

HERE, ELSEWHERE = 0.6, 0.8  # how alike two names must be (difflib's ratio); elsewhere a mere likeness says little
LITTLE = 0.45  # how alike a key has to be to be listed beside a name that is like none
FARTHER = 0.1  # what a candidate elsewhere has to be better by than one here
FEW = 3  # a name that is legal in more places than this points to none of them
PART = 0.9  # micro_batch_size for train_micro_batch_size_per_gpu, rl for lr
WHOLE = 0.8  # compile_config for compile
BEGINNING = 0.7  # zero for zero_optimization
SHORT = 6  # letters below which a likeness elsewhere is chance, and only the same name counts


@dataclass(frozen=True)
class Meant:
    """What an unknown name stands for: a legal path, several, or a name that is refused for a reason of its own."""

    paths: tuple[str, ...] = ()  # without `deepspeed.`
    refusal: Refusal | None = None
    here: float = 0.0  # how alike the path's name is, where it is legal at the very level; 0 elsewhere


def meant(level: Level, name: str) -> Meant:
    """The best candidate for `name` at `level`; no paths where nothing is like it."""
    if "." in name and lookup(name) is not None:
        return Meant((name,))
    block = level.block
    found = [(0.0, 0, Meant())]
    for word, key in level.names().items():
        if word != "*":
            alike = likeness(name, word)
            found.append((alike, 2, Meant((_join(block, key.name),), here=alike)))
    for path, refusal in schema().refused.items():
        place, _, word = path.rpartition(".")
        alike, near = likeness(name, word, ELSEWHERE), place == block or (place == "*" and name == word)
        if alike >= ELSEWHERE and (near or word not in places()):
            found.append((alike if near else alike - FARTHER, 1, Meant((path,), refusal)))
    best = max(found, key=lambda item: item[:2])
    if best[0] < 1 - FARTHER:
        best = max([best, *_elsewhere(block, name)], key=lambda item: item[:2])
    return best[2] if best[0] >= HERE else Meant()


def _elsewhere(block: str, name: str) -> Iterator[tuple[float, int, Meant]]:
    """Candidates that are legal in other blocks; those inside `block` alone where there are many."""
    enough = ELSEWHERE if len(name) >= SHORT else 1.0
    for word, paths in places().items():
        alike = likeness(name, word, ELSEWHERE)
        if alike >= enough:
            others = tuple(path for path in paths if path.rpartition(".")[0] != block)
            inside = tuple(path for path in others if block and path.startswith(f"{block}."))
            near = inside if inside and len(others) > FEW else others
            if len(others) == len(paths) and len(near) <= FEW:
                yield alike - FARTHER, 0, Meant(near)


def other_shapes(level: Level, name: str) -> list[str]:
    """Types whose params have `name` where the chosen type's have not: WarmupDecayLR for total_num_steps."""
    shape = re.compile(rf"{re.escape(level.block)}\[(\w+)\]\.{re.escape(name)}")
    return [match[1] for match in map(shape.fullmatch, schema().keys) if match]


def nearest(level: Level, name: str) -> str:
    """The keys of `level` where they are few, else the ones that are a little like `name`."""
    names, which = [word for word in level.names() if word != "*"], "the keys here are"
    if len(names) > 12:
        alike = {word: _matcher(plain(name)).alike(plain(word), LITTLE) for word in names}
        names = sorted((word for word in names if alike[word] >= LITTLE), key=lambda word: -alike[word])[:3]
        which = "nearest to it here:"
    return f"leave it out; {which} {', '.join(names)}" if names else "leave it out: no key here is like it"


def likeness(name: str, word: str, least: float = HERE) -> float:
    """1 for the same name, 0.995 where case, hyphens, plural or British spelling differ, else difflib's ratio.

    A name that is a part or the beginning of the other, or has its letters, counts more than its ratio; a ratio below
    `least` may be given as 0.
    """
    if name == word:
        return 1.0
    ours, theirs = plain(name), plain(word)
    if ours == theirs:
        return 0.995
    ratio = min(_matcher(ours).alike(theirs, least), 0.99)
    share = min(len(ours), len(theirs)) / max(len(ours), len(theirs), 1) / 100  # of several wholes, the shortest
    if sorted(ours) == sorted(theirs):
        return max(ratio, PART)
    if min(len(ours), len(theirs)) >= SHORT and (ours in theirs or theirs in ours):
        return max(ratio, (PART if ours in theirs else WHOLE) + share)
    return max(ratio, BEGINNING + share) if len(ours) > 3 and theirs.startswith(ours) else ratio


class _Matcher:
    """difflib, which prepares one of the two sides once."""

    def __init__(self, name: str) -> None:
        self._matcher = SequenceMatcher(None, "", name, autojunk=False)

    def alike(self, word: str, least: float) -> float:
        self._matcher.set_seq1(word)
        if self._matcher.real_quick_ratio() < least or self._matcher.quick_ratio() < least:
            return 0.0
        return self._matcher.ratio()


@cache
def _matcher(name: str) -> _Matcher:
    return _Matcher(name)


@cache
def plain(name: str) -> str:
    """`Zero-Optimisations` -> zerooptimization."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name) if not name.isupper() else name
    words = re.split(r"[^a-z0-9]+", spaced.lower())
    american = [re.sub(r"is(e|er|ed|es|ing|ation|ations)$", r"iz\1", word) for word in words]
    return "".join(word if len(word) < 4 else word.removesuffix("s") for word in american)


@cache
def places() -> dict[str, tuple[str, ...]]:
    """Every legal name -> the paths it is legal at, the shapes of a block counted once."""
    found: dict[str, dict[str, None]] = {}
    for block, names in schema().levels.items():
        for name in names:
            if name != "*":
                found.setdefault(name, {})[_join(unshaped(block), name)] = None
    return {name: tuple(paths) for name, paths in found.items()}


def shown(paths: Iterable[str]) -> str:
    """Paths as the user writes them: deepspeed.optimizer.params.lr."""
    return either(tuple(f"{ROOT}.{path.replace('*', 'NAME')}" for path in paths))


def _join(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name
