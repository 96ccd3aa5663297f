"""Where each value of a plan comes from: a file of conf/, the command line, deepspeed.file, or a formula.

Called by `launcher.cli` beside the plan, for `mode=plan`, `mode=explain` and provenance.json. Reads conf/ once more
instead of composing again: only names matter here, the values are the plan's.
Must never be part of the plan or of its fingerprint: the same values from elsewhere are the same run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launcher import batch, ds_config
from launcher.ds_file import Folded, leaves
from launcher.ds_schema import ROOT, lookup
from launcher.ds_values import AUTO, show
from launcher.explain import CONF
from launcher.schema import RunConfig

COMMAND_LINE, FILE, STORED = "command line", "deepspeed.file", "config.yaml of the run"
_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")


def given(choices: Mapping[str, Any], typed: Iterable[tuple[str, bool]]) -> dict[str, str]:
    """{dotted option: file of conf/ or command line that decides it}; a later layer replaces an earlier one.

    `choices`: Hydra's, group -> choice, the last layer first. `typed`: option and whether it is deleted, as typed.
    """
    found = dict.fromkeys(values_of("config"), "conf/config.yaml")
    for group, choice in reversed(list(choices.items())):
        if choice is not None and not group.startswith("hydra/"):
            found |= dict.fromkeys(values_of(f"{group}/{choice}"), f"conf/{group}/{choice}.yaml")
    for path, deleted in typed:
        for inner in [at for at in found if deleted and (at == path or at.startswith(f"{path}."))]:
            del found[inner]
        if not deleted:
            found[_documented(path)] = COMMAND_LINE
    return found


def sources(
    config: RunConfig, deepspeed: dict[str, Any], origin: Mapping[str, str], folded: Folded | None
) -> dict[str, str]:
    """{dotted option or deepspeed.KEY: its source} of every value of a plan; `origin` is what `given` says."""
    found = {}
    for path, value in leaves(dataclasses.asdict(dataclasses.replace(config, deepspeed={}))):
        if path != ROOT:
            found[path] = _of_option(path, value, config, origin, folded)
    asked = dict(leaves(config.deepspeed))
    formulas = batch.formulas(config.train)
    for path, _ in leaves(deepspeed):
        option = ds_config.BATCH_KEYS.get(path)
        if option is not None:
            how = f"solved: {formulas[option]}" if option in formulas else found[option]
        elif asked.get(path, AUTO) == AUTO and path in ds_config.SOLVED:
            how = f"solved: {ds_config.SOLVED[path]}"
        elif folded is not None and path in folded.solved:
            how = f"solved: {folded.solved[path]}"
        elif folded is not None and path in folded.paths:
            how = FILE
        else:
            how = _upwards(f"{ROOT}.{path}", origin)
        found[f"{ROOT}.{path}"] = how
    return found


def replaced(folded: Folded | None, origin: Mapping[str, str]) -> list[str]:
    """One line for each value of `deepspeed.file` that another layer replaces: by what, and how to keep the file's."""
    lines = []
    for item in folded.replaced if folded is not None else ():
        where = f"{ROOT}.{item.path}"
        source = _upwards(where, origin)
        group = re.fullmatch(r"conf/(\w+)/\w+\.yaml", source)
        if source == COMMAND_LINE:
            keep = "leave it out"
        elif group and group[1] != "experiment":
            keep = f"use ~{group[1]}"
        else:
            keep = f"use ~{where}"
        old, new = (value if isinstance(value, str) else show(value) for value in (item.old, item.new))
        lines.append(f"{FILE}: {item.path} {old} replaced by {new} ({source}); {keep} to keep the file's")
    return lines


def continued(old: Mapping[str, str], before: RunConfig, after: RunConfig, origin: Mapping[str, str]) -> dict[str, str]:
    """`given` of a resumed run: the stored sources, and those of this command line where it changed a value."""
    stored = dict(leaves(dataclasses.asdict(before)))
    result = {}
    for path, value in leaves(dataclasses.asdict(after)):
        same = path in stored and stored[path] == value
        result[path] = old.get(path, STORED) if same else _upwards(path, origin)
    return result


def _of_option(path: str, value: Any, config: RunConfig, origin: Mapping[str, str], folded: Folded | None) -> str:
    source = _upwards(path, origin)
    if folded is not None and path in folded.batch and source != COMMAND_LINE and value == folded.batch[path]:
        return FILE
    if path.startswith("model.config.") and config.model.path is not None and path not in origin:
        return "model.path"
    if path == "data.cache_dir" and source.startswith("conf/"):
        return "solved: the user's cache folder"
    return source


def _upwards(path: str, origin: Mapping[str, str]) -> str:
    """The source of the option, or of the nearest block around it."""
    while path:
        if path in origin:
            return origin[path]
        path = path.rpartition(".")[0]
    return STORED


def choices_of(name: str) -> dict[str, Any]:
    """{group: choice} of the defaults list in conf/`name`.yaml, its own and those it overrides."""
    entries = [entry for entry in _content(CONF / f"{name}.yaml").get("defaults", []) if isinstance(entry, dict)]
    return {group.removeprefix("override /"): choice for entry in entries for group, choice in entry.items()}


def values_of(name: str) -> dict[str, Any]:
    """{dotted option: value} that the file conf/`name`.yaml sets; nothing for a file that lies elsewhere."""
    path = CONF / f"{name}.yaml"
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    package = _PACKAGE.match(text)
    prefix = package[1] if package else "_global_" if name == "config" else name.partition("/")[0]
    content = {key: item for key, item in _content(path).items() if key not in ("defaults", "hydra")}
    if not content:
        return {prefix: {}}  # it makes the block, without a key in it
    before = "" if prefix == "_global_" else f"{prefix}."
    return {_documented(before + where): value for where, value in leaves(content)}


def _content(path: Path) -> dict[str, Any]:
    import yaml  # 40 ms of its own where nothing else has loaded it

    text = path.read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}


def _documented(path: str) -> str:
    """The path with DeepSpeed's documented name where another name of the key was written."""
    block, _, name = path.rpartition(".")
    key = lookup(path) if path.startswith(f"{ROOT}.") else None
    return f"{block}.{key.name}" if key is not None and name in key.aliases else path
