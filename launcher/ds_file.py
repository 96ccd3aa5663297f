"""The user's own DeepSpeed file (`deepspeed.file`) -> keys beneath those of the groups and the command line.

Called by `launcher.compose` when a request is typed. JSON as DeepSpeed reads it: comments are legal (HJSON), a key
given twice is not; the "auto" of Hugging Face's files means: whatever the rest of the request says.
Must never change a value in silence: each one of the file that another layer replaces is listed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.ds_config import BATCH_KEYS
from launcher.ds_schema import ROOT, lookup
from launcher.ds_values import AUTO, autos, normalise, show
from launcher.errors import Problem, UserError, raise_if
from launcher.schema import TrainSection

OPTION = f"{ROOT}.file"
PRECISIONS = ("bf16.enabled", "fp16.enabled")
TYPED = ("optimizer", "scheduler")  # whose params belong to one type
STAGE3_ONLY = ("zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold")
# Choices whose fragment has no key, and what of a file they would have to undo.
EMPTY = {
    "precision=fp32": PRECISIONS,
    "offload=none": ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"),
    "zeropp=off": (
        "zero_optimization.zero_hpz_partition_size",
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_gradients",
    ),
    "schedule=constant": ("scheduler.type",),
}


class _Nothing:
    """Stands for a key that is not there: null is a value."""


@dataclass(frozen=True)
class Replaced:
    """A value of the file that a group or the command line replaces."""

    path: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Folded:
    """The file beneath the rest of the request. Paths are without `deepspeed.`."""

    file: str
    deepspeed: dict[str, Any]
    paths: frozenset[str]  # whose value is the file's own
    replaced: tuple[Replaced, ...]
    solved: dict[str, str]  # an "auto" of the file that was answered here -> how
    batch: dict[str, int]  # train.* option -> the size the file has


def fold(path: str, above: dict[str, Any]) -> Folded:
    """`above` (groups, then command line) merged over the file at `path`, block by block: a block's other keys stay."""
    below, upper = normalise(read(path))[0], normalise(above)[0]
    batch = {BATCH_KEYS[key]: below.pop(key) for key in BATCH_KEYS if key in below}
    batch = {option: size for option, size in batch.items() if size != AUTO}
    solved = _answer_autos(below, upper)
    covered = {where: (old, _covering(upper, where)) for where, old in leaves(below)}
    replaced = tuple(
        Replaced(where, old, new)
        for where, (old, new) in covered.items()
        if new is not _Nothing and new != old and not (old == {} and isinstance(new, dict))
    )
    own = frozenset(where for where, (_, new) in covered.items() if new is _Nothing)
    return Folded(path, merge(below, upper), own, replaced, solved, batch)


def read(path: str) -> dict[str, Any]:
    """The configuration in the file; raises UserError with the line where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text: {error}"
        raise _bad(path, f"it cannot be read: {reason}", "name a JSON file with DeepSpeed's keys") from None

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            found = [str(number) for number, line in enumerate(text.splitlines(), 1) if _names(line, twice)]
            raise _bad(path, f"a block holds {twice} twice (lines {', '.join(found)})", "keep one of them")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError:
        import hjson  # 15 ms that strict JSON does not need

        try:
            value = hjson.loads(text, object_pairs_hook=once)
        except hjson.HjsonDecodeError as error:
            raise _bad(
                f"{path}, line {error.lineno}", f"not JSON: {error.msg} (column {error.colno})", "correct that line"
            ) from None
    if not isinstance(value, dict):
        raise _bad(path, f"it holds {show(value)}, where a block of DeepSpeed's keys stands", "write {...}")
    return value


def take_batch(folded: Folded, train: TrainSection) -> None:
    """The file's batch sizes into `train` where it has none; raises UserError where the two disagree."""
    problems = []
    for option, size in folded.batch.items():
        name = option.partition(".")[2]
        given = getattr(train, name)
        if given is None and isinstance(size, int) and not isinstance(size, bool):
            setattr(train, name, size)
        elif given != size:
            key = next(key for key, owner in BATCH_KEYS.items() if owner == option)
            why = f"{folded.file} has {key} = {show(size)}"
            fix = f"leave {option} out, or take {key} out of the file"
            if given is None:
                why, fix = f"{why}, which is no number of samples", f"correct it there, or use {option}"
            problems.append(Problem(option, "nothing" if given is None else str(given), why, fix))
    raise_if(problems)


def contradictions(folded: Folded, overrides: Collection[str]) -> list[Problem]:
    """A Problem for each choice on the command line that has no key to undo what the file asks for."""
    found = []
    for choice, paths in EMPTY.items():
        wanted = [path for path in paths if path in folded.paths and _asks(_at(folded.deepspeed, path))]
        if choice in overrides and wanted:
            group, _, name = choice.partition("=")
            why = f"{folded.file} has {', '.join(f'{path} = {show(_at(folded.deepspeed, path))}' for path in wanted)}"
            why += f", and conf/{group}/{name}.yaml has no key that replaces it"
            fix = f"leave {choice} out to keep the file's, or take it out of the file"
            found.append(Problem(group, name, why, fix))
    return found


def located(folded: Folded | None, problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """The problems; those that stand in the file say so."""

    def inside(problem: Problem) -> bool:
        at = problem.where.removeprefix(f"{ROOT}.")
        return folded is not None and at != problem.where and any(_within(path, at) for path in folded.paths)

    found = tuple(problems)
    if folded is None:
        return found
    return tuple(
        dataclasses.replace(problem, where=f"{problem.where} in {folded.file}") if inside(problem) else problem
        for problem in found
    )


def _within(path: str, at: str) -> bool:
    """Whether the key at `path` is what a problem at `at` speaks of: the same, one inside, or an element of it."""
    return path == at or path.startswith(f"{at}.") or at.startswith((f"{path}.", f"{path}["))


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`: blocks key by key, everything else whole."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if both else value
    return result


def leaves(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything that is no block; an empty block counts as a value."""
    for key, item in value.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(item, dict) and item:
            yield from leaves(item, where)
        else:
            yield where, item


def _answer_autos(below: dict[str, Any], above: dict[str, Any]) -> dict[str, str]:
    """Takes out every "auto" of the file that is answered here; the others `ds_config` solves, or `ds_check` refuses.

    The word is that of transformers' integrations/deepspeed.py: take what the trainer's other arguments say.
    """
    solved: dict[str, str] = {}
    stage = _at(merge(below, above), "zero_optimization.stage")
    for path, value in list(leaves(below)):
        key = lookup(path)
        if value != AUTO or (key is not None and not autos(key, value)):
            continue
        given = _covering(above, path) is not _Nothing
        if given or _of_another_type(path, below, above) or (path in STAGE3_ONLY and stage != 3):
            _take(below, path)
        elif path in PRECISIONS:
            _put(below, path, False)
            solved[path] = "the precision group does not ask for it"
    return solved


def _of_another_type(path: str, below: dict[str, Any], above: dict[str, Any]) -> bool:
    """Whether `path` is a parameter of an optimizer or scheduler that the request replaces by another."""
    block, _, rest = path.partition(".")
    if block not in TYPED or not rest.startswith("params."):
        return False
    one, other = _at(below, f"{block}.type"), _at(above, f"{block}.type")
    return other is not None and str(one).lower() != str(other).lower()


def _asks(value: Any) -> bool:
    """Whether the value of a key switches something on; a group of one rank does not."""
    return value is True or value not in (None, False, "none", 1)


def _covering(above: dict[str, Any], path: str) -> Any:
    """What stands in `above` at `path` or instead of a block around it; _Nothing where the file's value stays."""
    value: Any = above
    for name in path.split("."):
        if not isinstance(value, dict):
            return value
        if name not in value:
            return _Nothing
        value = value[name]
    return value


def _bad(where: str, why: str, fix: str) -> UserError:
    return UserError(Problem(OPTION, where, why, fix))


def _names(line: str, key: str) -> bool:
    return re.search(rf"(^|[\s{{,\"']){re.escape(key)}[\"']?\s*:", line) is not None


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _put(value: dict[str, Any], path: str, new: Any) -> None:
    *outer, name = path.split(".")
    for step in outer:
        value = value[step]
    value[name] = new


def _take(value: dict[str, Any], path: str) -> None:
    *outer, name = path.split(".")
    for step in outer:
        value = value[step]
    del value[name]
