"""Every key DeepSpeed's configuration may hold, from ds_schema.json: type, default, unit, legal words, old names.

Used by `ds_check` and `ds_values` to walk a configuration; ds_schema.json is written by scripts/make_ds_schema.py.
Must never hold a key, a default or a limit itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from launcher.errors import Problem

FILE = Path(__file__).with_name("ds_schema.json")
ROOT = "deepspeed"  # the option that holds the configuration; paths shown to users start with it


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """One legal key. `path` is dotted: `block[TYPE]` one of several shapes, `*` any name, `[]` each element."""

    path: str
    type: str  # int float bool str list object null
    null: bool = False  # null is legal too
    default: Any = None  # what DeepSpeed resolves an absent key to
    has_default: bool = False  # a default of None may be null, or none at all
    defaults: dict[str, Any] = field(default_factory=dict)  # where it differs by how an optimizer is built
    required: bool = False
    values: tuple[Any, ...] = ()  # the legal values, where they are few
    any_case: tuple[str, ...] = ()  # legal in upper and lower case
    words: tuple[str, ...] = ()  # legal besides the type: "auto" where DeepSpeed itself solves it
    items: Key | None = None  # what each element of a list is
    length: int | None = None
    or_list: bool = False  # a list of such values is legal too
    single: bool = False  # one element stands for a list of one
    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""
    aliases: tuple[str, ...] = ()  # other names DeepSpeed accepts in the same place
    only: tuple[str, ...] = ()  # ways an optimizer is built (plain, cpu, torch) that take this parameter
    classes: dict[str, str] = field(default_factory=dict)  # way -> class
    by: str = ""  # the sibling whose value chooses the shape of this block
    open: str = ""  # why the keys inside are not known
    free_keys: str = ""  # what the keys inside name; below each the keys are known again
    checked: bool = False  # DeepSpeed refuses an unknown key here; elsewhere it ignores it in silence
    source: str = ""  # DeepSpeed's file that reads it

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A key or value that is known and must not be used: why, and what to write instead (path or path=value)."""

    why: str
    use: str = ""


@dataclass(frozen=True)
class Schema:
    version: str  # of the DeepSpeed it was read from
    keys: dict[str, Key]
    refused: dict[str, Refusal]  # by path, or `*.name` for any place
    refused_values: dict[str, dict[str, Refusal]]
    levels: dict[str, dict[str, Key]]  # block ("" is the top) -> every legal name there, aliases too


@dataclass(frozen=True)
class Level:
    """One dictionary of a configuration and the block or blocks of the schema that describe it."""

    where: str  # as shown to users: deepspeed.zero_optimization
    blocks: tuple[str, ...]  # several while the sibling that chooses among them is unknown
    value: dict[Any, Any]
    mode: str  # how the optimizer is built: plain, cpu or torch

    def key(self, name: Any) -> Key | None:
        """The key called `name` here, None where there is none."""
        for block in self.blocks:
            names = schema().levels[block]
            if name in names or "*" in names:
                return names.get(name) or names["*"]
        return None

    def names(self) -> dict[str, Key]:
        """Every legal name at this level."""
        return {name: key for block in self.blocks for name, key in schema().levels[block].items()}

    @property
    def block(self) -> str:
        """Its path without the shape in brackets: optimizer.params."""
        return unshaped(self.blocks[0])

    @property
    def checked(self) -> bool:
        """Whether DeepSpeed itself refuses an unknown key here."""
        keys = schema().keys
        return all(block in keys and keys[block].checked for block in self.blocks)


@cache
def schema() -> Schema:
    """The schema, read once per process."""
    raw = json.loads(FILE.read_text(encoding="utf-8"))
    keys = {path: _key(path, node) for path, node in raw["keys"].items()}
    levels: dict[str, dict[str, Key]] = {"": {}}
    for path, key in keys.items():
        if key.type == "object":
            levels.setdefault(path, {})
        block, _, name = path.rpartition(".")
        if not name.endswith("]"):  # a shape of a block is not a key of the level above it
            level = levels.setdefault(block, {})
            level |= dict.fromkeys((name, *key.aliases), key)
    refused = {path: Refusal(**node) for path, node in raw["refused"].items()}
    values = {path: {v: Refusal(**n) for v, n in table.items()} for path, table in raw["refused_values"].items()}
    return Schema(raw["deepspeed"], keys, refused, values, levels)


def lookup(path: str, kind: str | None = None) -> Key | None:
    """The key at `path` (`optimizer.params.lr`; the leading `deepspeed.` may be there), None for an unknown one.

    `kind` is the optimizer's or scheduler's type where the path leads through its params; without it any type will do.
    """
    key, blocks = None, [""]
    for name in path.removeprefix(f"{ROOT}.").split("."):
        found = [level[name] for level in map(schema().levels.__getitem__, blocks) if name in level]
        found = found or [level["*"] for level in map(schema().levels.__getitem__, blocks) if "*" in level]
        if not found:
            return None
        key = found[0]
        blocks = _shapes(key, kind) if key.type == "object" else []
        if key.items is not None and key.items.type == "object":
            blocks = [f"{key.path}[]"]
    return key


def levels(deepspeed: dict[str, Any]) -> Iterator[Level]:
    """Every dictionary in `deepspeed` that the schema describes, the outer ones first.

    A level's values may be changed before the next one is asked for: the inner levels are found afterwards.
    """
    yield from _inside(Level(ROOT, ("",), deepspeed, ""), deepspeed)


def optimizer_mode(deepspeed: dict[str, Any]) -> str:
    """plain, cpu or torch: which class the engine builds for the optimizer's type (engine.py, 0.19.8).

    `torch` with optimizer.params.torch_adam, `cpu` when the optimizer is offloaded, else `plain`.
    """
    if _in(deepspeed, "optimizer", "params", "torch_adam") in (True, 1, "true", "True"):
        return "torch"
    device = _in(deepspeed, "zero_optimization", "offload_optimizer", "device")
    return "cpu" if device in ("cpu", "nvme") else "plain"


def unshaped(path: str) -> str:
    """`path` without the shapes of blocks: optimizer.params[adamw].lr -> optimizer.params.lr."""
    return re.sub(r"\[\w+\]", "", path)


def canonical(key: Key, value: Any) -> Any:
    """The spelling of `value` in the schema: AdamW -> adamw where case is free; an illegal value stays as it is."""
    if isinstance(value, str) and value not in key.values:
        return next((word for word in key.any_case if word.lower() == value.lower()), value)
    return value


def version_problem(installed: str | None = None) -> Problem | None:
    """Refuses a DeepSpeed whose keys are not those of the schema: an older one, or one of another minor release.

    `installed` is its version, by default that of this Python's own package.
    """
    wanted = schema().version
    if installed is None:
        from importlib import metadata  # 30 ms that planning does not need

        try:
            installed = metadata.version("deepspeed")
        except metadata.PackageNotFoundError:
            installed = "none"
    need, found = _numbers(wanted), _numbers(installed)
    if found[:2] == need[:2] and found >= need:
        return None
    if found < need:
        why = f"needs deepspeed >= {wanted}, found {installed}: it does not know every key that may be written here"
        return Problem("deepspeed", installed, why, f"pip install deepspeed=={wanted}")
    why = f"needs deepspeed {wanted}, found {installed}: keys may have been removed or have changed their meaning"
    return Problem("deepspeed", installed, why, f"pip install deepspeed=={wanted}, or scripts/make_ds_schema.py")


def _numbers(version: str) -> tuple[int, ...]:
    """0.19.8+cpu -> (0, 19, 8); a pre-release counts as before its release."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = tuple(int(part) for part in match[0].split(".")) if match else ()
    numbers = (*numbers, 0, 0, 0)[: max(3, len(numbers))]
    before = match is not None and re.match(r"\.?(a|b|rc|dev)\d*", version[match.end() :]) is not None
    return (*numbers[:-1], numbers[-1] - 1, 999) if before else numbers


def _key(path: str, node: dict[str, Any]) -> Key:
    fields: dict[str, Any] = {name: tuple(value) if name in _TUPLES else value for name, value in node.items()}
    if "items" in node:
        fields["items"] = _key(f"{path}[]", node["items"])
    return Key(path, has_default="default" in node, **fields)


_TUPLES = ("values", "any_case", "words", "aliases", "only")


def _shapes(key: Key, kind: Any) -> list[str]:
    """Blocks of the schema that describe what `key` holds: one, or all shapes where `kind` does not choose."""
    if not key.by:
        return [key.path]
    block = key.path.rpartition(".")[0]
    chosen = f"{key.path}[{canonical(schema().keys[f'{block}.{key.by}'], kind)}]"
    if chosen in schema().levels:
        return [chosen]
    return [path for path in schema().levels if path.startswith(f"{key.path}[")]


def _inside(level: Level, root: dict[str, Any]) -> Iterator[Level]:
    yield level
    for name, value in list(level.value.items()):
        key = level.key(name)
        if key is None or key.open:
            continue
        where = f"{level.where}.{name}"
        if key.type == "object" and isinstance(value, dict):
            blocks = tuple(_shapes(key, level.value.get(key.by)))
            yield from _inside(Level(where, blocks, value, optimizer_mode(root)), root)
        elif key.items is not None and key.items.type == "object" and isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _inside(Level(f"{where}[{index}]", (f"{key.path}[]",), item, ""), root)


def _in(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value
