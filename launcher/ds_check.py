"""The DeepSpeed configuration -> everything in it that DeepSpeed would ignore, misread or refuse.

Called when a plan is built, on what `ds_values.normalise` made of the user's words; all problems at once.
Must never warn, and never know a key that ds_schema.json does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from launcher.ds_names import meant, nearest, other_shapes, shown
from launcher.ds_numbers import Unfit
from launcher.ds_schema import ROOT, Key, Level, Refusal, levels, schema
from launcher.ds_values import AUTO, autos, convert, either, example, not_a_mapping, problem_of, show
from launcher.errors import Problem

TYPO = 0.85  # likeness from which a name is a misspelt key here, though it is a key of another type's params
WAYS = {
    "plain": "without offload of the optimizer",
    "cpu": "with the optimizer offloaded",
    "torch": "with deepspeed.optimizer.params.torch_adam=true",
}


def check(
    deepspeed: Any,
    resolvable: Collection[str] = (),
    owned: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Every problem of names, types and values in `deepspeed`, outer blocks first.

    `resolvable` holds paths (`zero_optimization.zero_hpz_partition_size`) whose "auto" is solved later; `owned` maps a
    path to the option that sets it (`train_batch_size` -> `train.global_batch_size`), which a fix then names instead.
    """
    if not isinstance(deepspeed, dict):
        return [not_a_mapping(deepspeed)]
    solved = {path.removeprefix(f"{ROOT}.") for path in resolvable}
    problems: list[Problem] = []
    for level in levels(deepspeed):
        problems += _twice(level)
        for name, value in level.value.items():
            key = level.key(name)
            where = f"{level.where}.{name}"
            if key is None:
                problems.append(_unknown(level, name, value, owned or {}))
            elif value == AUTO and where.removeprefix(f"{ROOT}.") in solved:
                continue
            else:
                problems += _judge(level, key, where, value)
    return problems


def missing(deepspeed: dict[str, Any]) -> list[Problem]:
    """A problem for every key that a block of the final configuration cannot do without."""
    return [
        Problem(f"{level.where}.{name}", "nothing", f"{level.block} {_lack(name)}", f"add {level.where}.{name}=VALUE")
        for level in levels(deepspeed)
        if len(level.blocks) == 1
        for name, key in level.names().items()
        if key.required and name not in level.value
    ]


def _lack(name: str) -> str:
    if name == "type":
        return "without a type is ignored in silence"
    return "cannot do without it: training would fail when it starts"


# --- values ----------------------------------------------------------------------------------------------------------


def _judge(level: Level, key: Key, where: str, value: Any) -> Iterator[Problem]:
    """Problems of one known key's value; a block's own keys are judged at their level."""
    if key.only and level.mode not in key.only and len(level.blocks) == 1:  # several: the type itself is not known
        yield _not_taken(level, key, where, value)
    if isinstance(value, dict) and key.type == "object" and not key.open:
        return
    unsolved = list(autos(key, value))
    yield from (_auto(level, key, where + at) for at in unsolved)
    if not unsolved:
        try:
            convert(key, value)
        except Unfit as unfit:
            yield problem_of(where, value, unfit)


def _auto(level: Level, key: Key, where: str) -> Problem:
    """DeepSpeed solves no "auto": config_utils.py drops it in checked blocks, elsewhere it arrives as text."""
    if level.checked and not level.block.endswith(".params"):
        why = "DeepSpeed drops the word here and takes its default in silence"
    else:
        why = "DeepSpeed solves no auto: the word itself would arrive, and fail once training has started"
    return Problem(where, show(AUTO), why, example(key))


def _not_taken(level: Level, key: Key, where: str, value: Any) -> Problem:
    """A parameter of another class than the one DeepSpeed builds for this type."""
    classes = schema().keys[level.blocks[0]].classes
    built = classes.get(level.mode, classes["plain"])
    takers = either(tuple(f"{classes.get(way, 'the class')} {WAYS[way]}" for way in key.only))
    fix = f"leave it out; it is for {takers}"
    return Problem(where, show(value), f"{built}, which DeepSpeed builds here, does not take it", fix)


# --- names -----------------------------------------------------------------------------------------------------------


def _twice(level: Level) -> Iterator[Problem]:
    """Two names of one key in one block."""
    for name, key in level.names().items():
        if name in key.aliases and name in level.value and key.name in level.value:
            where = f"{level.where}.{name}"
            why = f"another name of {key.name}, which is given too"
            yield Problem(where, show(level.value[name]), why, f"keep {level.where}.{key.name} alone")


def _unknown(level: Level, name: Any, value: Any, owned: Mapping[str, str]) -> Problem:
    where, got, found = f"{level.where}.{name}", show(value), meant(level, str(name))
    if found.refusal is not None:
        why = _why_refused(found.paths[0], str(name), found.refusal)
        return Problem(where, got, why, _instead(found.refusal, owned))
    place = level.where.removeprefix(f"{ROOT}.") if level.block else ""
    why = f"not a key of DeepSpeed {schema().version} {f'in {place}' if place else 'at the top level'}"
    shapes = other_shapes(level, str(name))
    if shapes and found.here < TYPO:
        chosen = level.blocks[0].rpartition("[")[2].rstrip("]")
        fix = f"leave it out; it belongs to {either(tuple(shapes))}"
        return Problem(where, got, f"{why}: {chosen} does not take it", fix)
    why += "; DeepSpeed would " + ("refuse it when training starts" if level.checked else "ignore it in silence")
    if not found.paths:
        return Problem(where, got, why, nearest(level, str(name)))
    if owned.keys() & found.paths:
        return Problem(where, got, why, f"use {either(tuple(owned.get(path, path) for path in found.paths))}")
    if found.here:
        return Problem(where, got, why, f"did you mean {level.where}.{found.paths[0].rpartition('.')[2]}?")
    return Problem(where, got, why, f"it belongs at {shown(found.paths)}")


def _why_refused(path: str, name: str, refusal: Refusal) -> str:
    known = path.rpartition(".")[2]
    return refusal.why if known == name else f"not a key; it is like {known}, which is refused: {refusal.why}"


def _instead(refusal: Refusal, owned: Mapping[str, str]) -> str:
    if refusal.use in owned:
        return f"use {owned[refusal.use]}"
    return f"use {ROOT}.{refusal.use}" if refusal.use else "leave it out"
