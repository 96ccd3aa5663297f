"""The DeepSpeed configuration as a user writes it -> numbers, booleans and lists of the types DeepSpeed's keys have.

Called when a plan is built, before the configuration is judged; `ds_check` uses the same conversion to judge a value.
Must never change what it is given, nor turn a value into another one: what does not fit is refused.

Accepted besides JSON's own types: whole floats where an integer stands; numbers as text (`ds_numbers` lists the forms);
booleans as pydantic takes them: true, yes, on, 1 and false, no, off, 0, as text in any case or as the integers 0 and 1,
so that the blocks DeepSpeed does not check take what the others take (there a "false" would count as true). A boolean
is never a number. A second name of a key (`prefetch_bucket_size`) becomes the documented one
(`stage3_prefetch_bucket_size`): everything that reads a plan reads one spelling.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from launcher.ds_numbers import Unfit, number
from launcher.ds_schema import ROOT, Key, canonical, levels, schema
from launcher.errors import Problem

AUTO = "auto"
INT64 = 2**63 - 1  # torch counts elements in 64 bits
TRUE, FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")
SWITCHES = (
    "enabled",
    "device",
    "type",
    "stage",
    "tp_size",
    "deepcompile",
)  # what one value for a block means most often


def normalise(deepspeed: Any) -> tuple[dict[str, Any], list[Problem]]:
    """A copy of `deepspeed` whose values have their keys' types, and a Problem for each that cannot have it.

    A value that does not fit stays as it is; `ds_check.check` on the result reports it again. Unknown keys, what lies
    under them, and every "auto" (which the plan may still solve) are copied untouched.
    """
    if not isinstance(deepspeed, dict):
        return {}, [not_a_mapping(deepspeed)]
    result, problems = copy.deepcopy(deepspeed), []
    for level in levels(result):
        _rename(level.value, level.names())
        for name, value in level.value.items():
            key = level.key(name)
            if key is None or autos(key, value):
                continue
            try:
                level.value[name] = convert(key, value)
            except Unfit as unfit:
                problems.append(problem_of(f"{level.where}.{name}", value, unfit))
    return result, problems


def convert(key: Key, value: Any) -> Any:
    """`value` with the type of `key`; raises Unfit with the reason and the fix."""
    if value is None:
        if key.null or key.type == "null":
            return None
        raise Unfit(f"null, where {_kind(key)} stands", "leave the key out to get DeepSpeed's default")
    if isinstance(value, str) and value in key.words:
        return value
    if key.type == "object":
        return _block(key, value)
    if key.type == "list" or (key.or_list and isinstance(value, (list, tuple))):
        return _list(key, value)
    if isinstance(value, (dict, list, tuple)):
        raise Unfit(f"a {'block' if isinstance(value, dict) else 'list'}, where {_kind(key)} stands", example(key))
    return _within(key, _SCALARS[key.type](key, value))


def autos(key: Key, value: Any) -> list[str]:
    """Where in the value of `key` the word "auto" stands that DeepSpeed does not solve: "" for the value itself.

    What lies in blocks is theirs to judge, but for a block whose keys are not known.
    """
    if isinstance(value, str):
        return [""] if value == AUTO and AUTO not in (*key.words, *key.values) else []
    if isinstance(value, (list, tuple)):
        items = [(f"[{index}]", item) for index, item in enumerate(value) if key.open or not isinstance(item, dict)]
    else:
        items = [(f".{name}", item) for name, item in value.items()] if key.open and isinstance(value, dict) else []
    element = Key(key.path, "", open=key.open)  # no element is solved by DeepSpeed
    return [at + inner for at, item in items for inner in autos(element, item)]


def problem_of(where: str, value: Any, unfit: Unfit) -> Problem:
    """The Problem of a value that does not fit; in a list, of the element."""
    for index in re.findall(r"\[(\d+)\]", unfit.at):
        value = value[int(index)]
    return Problem(where + unfit.at, show(value), unfit.why, unfit.fix)


def not_a_mapping(value: Any) -> Problem:
    """The Problem of a configuration that is no mapping at all."""
    return Problem(ROOT, show(value), "the DeepSpeed configuration is a mapping of keys", f"write {ROOT}.KEY=VALUE")


def show(value: Any) -> str:
    """`value` as JSON, shortened: text stays in quotes, so that "3" and 3 can be told apart."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def either(words: tuple[Any, ...]) -> str:
    """`none, cpu or nvme`."""
    shown = [word if isinstance(word, str) else json.dumps(word) for word in dict.fromkeys(words)]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def described(key: Key) -> str:
    """What the key holds, in words: `a whole number of elements, more than 0`."""
    words = [_kind(key)] if not (key.any_case or key.values) else [either((*key.any_case, *key.values))]
    for limit, bound in ((key.min, "at least"), (key.above, "more than"), (key.max, "at most"), (key.below, "below")):
        if limit is not None:
            words.append(f"{bound} {int(limit) if float(limit).is_integer() else limit}")
    if key.unit and not _counts(key):
        words.append(f"unit: {key.unit}")
    if key.words:
        words.append(f"or {either(key.words)}")
    return ", ".join(words) + (", or null" if key.null else "")


def example(key: Key) -> str:
    """What to write instead, with DeepSpeed's own default where it has one."""
    legal = (*key.words, *key.any_case, *key.values)
    if legal:
        return f"use {either(legal)}"
    default = ""
    if key.has_default and key.default is not None:
        default = f"; without the key DeepSpeed takes {show(key.default)}"
    if key.type == "list":
        return f"write a list, [a, b]{default}"
    if key.type in ("bool", "str"):
        return f"write {_kind(key)}{default}"
    numbers = {"bytes": "1048576 or 1MiB", "elements": "1000000, 1e6 or 1M", "parameters": "1000000, 1e6 or 1M"}
    such = numbers.get(key.unit, "100" if key.type == "int" else "0.1 or 1e-5")
    return f"write {_kind(key)}, such as {such}{default}"


def _rename(value: dict[Any, Any], names: dict[str, Key]) -> None:
    """Aliases -> documented names, in place and in order; a pair of both stays for the check to refuse."""
    wanted = {name: names[name].name for name in value if name in names and name in names[name].aliases}
    renamed = {name: new for name, new in wanted.items() if new not in value}
    if renamed:
        items = [(renamed.get(name, name), item) for name, item in value.items()]
        value.clear()
        value.update(items)


# --- scalars ---------------------------------------------------------------------------------------------------------


def _whole(key: Key, value: Any) -> int:
    """A whole number; nothing is rounded."""
    exact = number(value, key.unit, _kind(key), example(key))
    if not -INT64 <= exact <= INT64:
        raise Unfit(f"larger than DeepSpeed can count: the limit is {INT64}", example(key))
    if exact != int(exact):
        raise Unfit(f"must be {_kind(key)}", example(key))
    return int(exact)


def _real(key: Key, value: Any) -> float:
    exact = number(value, key.unit, _kind(key), example(key))
    try:
        real = float(exact)
    except OverflowError:
        real = math.inf
    if not math.isfinite(real):
        raise Unfit("larger than a float can hold", example(key))
    if real == 0 and isinstance(exact, Decimal) and exact != 0:
        raise Unfit("smaller than a float can hold: it would become 0", example(key))
    return real


def _truth(key: Key, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if type(value) is int and value in (0, 1):
        return value == 1
    if isinstance(value, str) and value.strip().lower() in TRUE + FALSE:
        return value.strip().lower() in TRUE
    raise Unfit("neither true nor false", "write true or false")


def _text(key: Key, value: Any) -> str:
    if not isinstance(value, str):
        raise Unfit(f"a {'boolean' if isinstance(value, bool) else 'number'}, where text stands", example(key))
    return value


def _never(key: Key, value: Any) -> Any:
    raise Unfit("DeepSpeed takes null alone here", "leave the key out")


_SCALARS: dict[str, Callable[[Key, Any], Any]] = {
    "int": _whole,
    "float": _real,
    "bool": _truth,
    "str": _text,
    "null": _never,
}


# --- lists, blocks and limits ----------------------------------------------------------------------------------------


def _list(key: Key, value: Any) -> list[Any]:
    if isinstance(value, str) and key.single:
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise Unfit(f"not a list, where {_kind(key)} stands", example(key))
    if key.length is not None and len(value) != key.length:
        raise Unfit(f"a list of {len(value)}, where DeepSpeed takes one of {key.length}", example(key))
    result = []
    for index, item in enumerate(value):
        try:
            result.append(item if key.items is None else convert(key.items, item))
        except Unfit as unfit:
            raise Unfit(unfit.why, unfit.fix, f"[{index}]{unfit.at}") from None
    return result


def _block(key: Key, value: Any) -> Any:
    if isinstance(value, dict):
        return value
    names = schema().levels.get(key.path, {})
    switch = next((name for name in SWITCHES if name in names), None)
    if switch == "stage" and (isinstance(value, bool) or value not in names["stage"].values):
        fix = f"write {ROOT}.{key.path}.stage={either(names['stage'].values)}"
    elif switch and not isinstance(value, (list, tuple)):
        fix = f"write {ROOT}.{key.path}.{switch}={json.dumps(value).strip(chr(34))}"
    else:
        fix = f"write its keys, such as {ROOT}.{key.path}.{next(iter(names), 'KEY')}=VALUE"
    raise Unfit("a single value, where DeepSpeed expects a block of keys", fix)


def _within(key: Key, value: Any) -> Any:
    """`value` where it is among the legal ones and inside the limits."""
    legal = (*key.any_case, *key.values)
    if legal and canonical(key, value) not in legal:
        raise _not_legal(key, value, legal)
    counted = f" ({key.unit})" if key.unit else ""
    for limit, broken, words in (
        (key.min, key.min is not None and value < key.min, "at least"),
        (key.max, key.max is not None and value > key.max, "at most"),
        (key.above, key.above is not None and value <= key.above, "more than"),
        (key.below, key.below is not None and value >= key.below, "less than"),
    ):
        if broken and limit is not None:
            bound = f"{words} {int(limit) if float(limit).is_integer() else limit}"
            raise Unfit(f"it is {bound}{counted}", f"write a number that is {bound}")
    return value


def _not_legal(key: Key, value: Any, legal: tuple[Any, ...]) -> Unfit:
    for word, refusal in schema().refused_values.get(key.path, {}).items():
        if str(value).lower() == word.lower():
            return Unfit(refusal.why, f"write {ROOT}.{refusal.use}" if refusal.use else f"use {either(legal)}")
    near = next((word for word in legal if str(word).lower() == str(value).lower()), None)
    if near is not None:
        return Unfit("DeepSpeed tells upper and lower case apart here", f"write {near}")
    return Unfit(f"not a value of {key.name.removesuffix('[]')}", f"use {either((*key.words, *legal))}")


def _counts(key: Key) -> bool:
    """Whether the unit is something one counts: "elements", not "L2 norm, 0 is off"."""
    return key.type == "int" and key.unit.endswith("s") and "," not in key.unit


def _kind(key: Key) -> str:
    """What the key holds, in words: a whole number of elements."""
    if key.type == "int":
        return f"a whole number of {key.unit}" if _counts(key) else "a whole number"
    if key.type == "list" and key.items is not None and key.items.type in ("int", "float"):
        return "a list of numbers"
    words = {"float": "a number", "bool": "true or false", "str": "text", "list": "a list"}
    return words.get(key.type, "a block of keys" if key.type == "object" else "null")
