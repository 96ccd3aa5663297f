"""One option, group or DeepSpeed key -> all that is known of it: type, default, meaning, cost, rules, value and source.

Called by `launcher.cli` for `mode=explain`. Meanings: launcher/schema.py, ds_meanings.json, the headers of conf/.
Must never judge a request: a wrong one can be explained as well.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from launcher import ds_config, rules
from launcher.ds_file import leaves
from launcher.ds_names import places
from launcher.ds_schema import ROOT, Key, lookup, schema, unshaped
from launcher.ds_values import described, show
from launcher.errors import Problem, UserError
from launcher.explain import CONF, groups
from launcher.help import option_sentences
from launcher.provenance import COMMAND_LINE, FILE, choices_of, given, values_of
from launcher.schema import RunConfig, option_types

MEANINGS = Path(__file__).with_name("ds_meanings.json")
UNKNOWN = "see DeepSpeed's documentation"
Lines = list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Known:
    """What the request says: its options, the DeepSpeed dict as far as it could be built, and where both come from."""

    config: RunConfig
    deepspeed: dict[str, Any]
    sources: Mapping[str, str]
    choices: Mapping[str, Any]
    overrides: Sequence[str]


def describe(key: str | None, known: Known) -> Lines:
    """(label, text) of everything about `key`; raises UserError with what could be meant for an unknown one."""
    if key is None:
        raise UserError(Problem("key", "nothing", "mode=explain explains one key", "add key=zero_optimization.stage"))
    if key in groups():
        return _group(key, known)
    if key == FILE:
        return _file(known)
    if key in option_types():
        return _option(key, known)
    path = re.sub(r"\[\d*\]", "", key.removeprefix(f"{ROOT}."))  # an element of a list is asked for as the list
    block = path.rpartition(".params.")[0]
    chosen = known.deepspeed.get(block)
    kind = str(chosen.get("type")) if isinstance(chosen, dict) else None
    found = lookup(path, kind) or lookup(path)
    if found is not None:
        return _deepspeed(path.rpartition(".")[0], found, known)
    section = [option for option in option_types() if option.startswith(f"{key}.")]
    if section:
        return [("options", ""), *((option, option_sentences()[option]) for option in section)]
    free = next((option for option in ("data", "model.config", "cluster.env") if key.startswith(f"{option}.")), None)
    if free and key in known.sources:
        return [(key, f"one of the keys of {free}"), ("meaning", option_sentences()[free]), *_now(key, known)]
    raise UserError(Problem("key", key, "no option, group or DeepSpeed key has this name", _meant(key)))


def _group(name: str, known: Known) -> Lines:
    lines = [("group", name)]
    for choice in groups()[name]:
        comments = [
            line.lstrip("# ")
            for line in (CONF / name / f"{choice}.yaml").read_text(encoding="utf-8").splitlines()
            if line.startswith("#") and "@package" not in line and "python launch.py" not in line
        ]
        lines.append((f"{name}={choice}", " ".join(comment for comment in comments if comment)))
    default, chosen = choices_of("config").get(name), known.choices.get(name)
    lines += [
        ("default", f"{name}={default}, conf/config.yaml decides" if default else "none"),
        ("rules", _rules_of_group(name)),
        ("value", f"{name}={chosen}" if chosen is not None else "none"),
        ("from", _chooser(name, known)),
    ]
    return lines


def _chooser(group: str, known: Known) -> str:
    """Which layer chose the group's file."""
    experiment = known.choices.get("experiment")
    if any(text.lstrip("~").partition("=")[0] == group for text in known.overrides):
        return COMMAND_LINE
    if experiment is not None and group in choices_of(f"experiment/{experiment}"):
        return f"conf/experiment/{experiment}.yaml"
    return "conf/config.yaml"


def _file(known: Known) -> Lines:
    typed = [text.partition("=")[2] for text in known.overrides if text.lstrip("+").startswith(f"{FILE}=")]
    return [
        (FILE, "path of a JSON or HJSON file with DeepSpeed's keys, or null"),
        ("default", "null"),
        ("meaning", option_sentences()[ROOT]),
        ("value", typed[-1] if typed else "absent"),
    ]


def _option(path: str, known: Known) -> Lines:
    file = given(known.choices, []).get(path)
    values = values_of(file.removeprefix("conf/").removesuffix(".yaml")) if file is not None else {}
    default = f"{show(values[path])}, {file} decides" if path in values else "none: it has to be given"
    return [
        (path, option_types()[path]),
        ("default", default),
        ("meaning", option_sentences()[path]),
        ("rules", _rules(path, [])),
        *_now(path, known),
    ]


def _deepspeed(block: str, key: Key, known: Known) -> Lines:
    path = f"{block}.{key.name}" if block else key.name
    texts = json.loads(MEANINGS.read_text(encoding="utf-8"))
    about = texts.get(unshaped(path), {})
    lines = [
        (f"{ROOT}.{path}", described(key)),
        ("default", _default(key, path)),
        ("meaning", about.get("is", UNKNOWN)),
    ]
    if "costs" in about:
        lines.append(("costs", about["costs"]))
    if path in ds_config.SOLVED:
        lines.append(("auto", f"solved: {ds_config.SOLVED[path]}"))
    if path in ds_config.BATCH_KEYS:
        lines.append(("set it as", ds_config.BATCH_KEYS[path]))
    if key.aliases:
        lines.append(("also called", ", ".join(key.aliases)))
    lines.append(("rules", _rules(path, [key.name, *key.aliases])))
    inner = schema().levels.get(key.path, {}) if key.type == "object" else {}
    keys = [(name, texts.get(f"{unshaped(path)}.{name}", {}).get("is", UNKNOWN)) for name in dict.fromkeys(_own(inner))]
    return [*lines, *_now(f"{ROOT}.{path}", known), *((f"{path}.{name}", text) for name, text in keys)]


def _own(level: dict[str, Key]) -> list[str]:
    return [key.name for name, key in level.items() if name not in key.aliases]


def _default(key: Key, path: str) -> str:
    if key.required:
        return "none: its block cannot do without it"
    if path in ds_config.BATCH_KEYS:
        return f"what {ds_config.BATCH_KEYS[path]} comes to, this launcher decides"
    if not key.has_default:
        return "DeepSpeed has no fixed one"
    others = "".join(f"; {show(value)} for the {way} class" for way, value in key.defaults.items())
    return f"{show(key.default)}{others}, DeepSpeed decides when the key is absent"


def _now(path: str, known: Known) -> Lines:
    """What the request has there, and from where."""
    everything = dataclasses.asdict(known.config) | {ROOT: known.deepspeed}
    value: Any = everything
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return [("value", "absent")]
        value = value[name]
    source = known.sources.get(path)
    if source is None and isinstance(value, dict):
        source = ", ".join(dict.fromkeys(known.sources.get(f"{path}.{inner}", "") for inner, _ in leaves(value)))
    return [("value", show(value)), ("from", source or "no layer")]


def _rules(path: str, names: Sequence[str]) -> str:
    """The rules whose code, or a helper's that they call, names the key; with the first line of their own words."""
    return _listed([rule for rule in rules.RULES if _touches(_code(rule), path, names)])


def _rules_of_group(group: str) -> str:
    """The rules that name the group, or a DeepSpeed key that one of its files sets."""
    keys = {path for choice in groups()[group] for path in values_of(f"{group}/{choice}") if path.startswith(ROOT)}
    inner = [path.removeprefix(f"{ROOT}.") for path in keys]
    codes = {rule: _code(rule) for rule in rules.RULES}
    return _listed(
        [
            rule
            for rule, code in codes.items()
            if _touches(code, group, []) or any(_touches(code, path, [path.rpartition(".")[2]]) for path in inner)
        ]
    )


def _touches(code: str, path: str, names: Sequence[str]) -> bool:
    """Whether a rule's code reads the option `path`, or the DeepSpeed key at `path` under one of its `names`."""
    if re.search(rf"\bconfig\.{re.escape(path)}\b|\"{re.escape(path)}\"", code):
        return True
    first = path.partition(".")[0]
    return any(f'"{first}"' in code and f'"{name}"' in code for name in names)


def _listed(found: Sequence[Any]) -> str:
    words = {rule: (inspect.getdoc(rule) or "").split("\n")[0] for rule in found}
    named = [rule.__name__.replace("_", " ") + (f" ({text})" if text else "") for rule, text in words.items()]
    return "; ".join(named) or "none beyond type and limits"


@functools.cache
def _code(rule: Any) -> str:
    """Source of a rule and of the helpers of this package it calls, with the names in the tables they read."""
    texts, todo, seen = [], [rule], set()
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        texts.append(inspect.getsource(function))
        for item in map(function.__globals__.get, function.__code__.co_names):
            if isinstance(item, FunctionType) and item.__module__.startswith("launcher."):
                todo.append(item)
            texts += [f'"{name}" "{name.partition(".")[0]}"' for name in _table(item)]
    return "\n".join(texts).replace('f"offload_{what}"', '"offload_optimizer" "offload_param"')


def _table(item: Any) -> list[str]:
    """The names in a constant of a rule's module, however deep its tuples are."""
    if isinstance(item, tuple | dict):
        return [name for entry in item for name in _table(entry)]
    return [item.removeprefix(f"{ROOT}.")] if isinstance(item, str) else []


def _meant(key: str) -> str:
    """The nearest names: options, groups and DeepSpeed's keys."""
    bare = key.removeprefix(f"{ROOT}.")
    deepspeed = list(dict.fromkeys(unshaped(item.path) for item in schema().keys.values() if "*" not in item.path))
    last = bare.rpartition(".")[2]
    exact = list(places().get(last, ()))[:3]
    names = [*option_types(), *groups(), *deepspeed]
    near = difflib.get_close_matches(bare, names, n=3, cutoff=0.6)
    alike = [
        path for word in difflib.get_close_matches(last, places(), n=2, cutoff=0.75) for path in places()[word][:2]
    ]
    hints = list(dict.fromkeys([*exact, *near, *alike]))[:4]
    return f"did you mean {' or '.join(hints)}?" if hints else "see python launch.py --help, and key=zero_optimization"
