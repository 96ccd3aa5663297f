"""Exception of Hydra or OmegaConf -> Problem: where, what was got, why, and the legal names next to it.

Called by `launcher.cli` and `launcher.compose` for whatever composing a request raises. Reads conf/'s file names only.
Must never import Hydra or OmegaConf: an exception's text and attributes say everything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import Problem
from launcher.schema import option_types

CONF = Path(__file__).resolve().parent.parent / "conf"
QUOTING = "quote the value for Hydra inside the shell's quotes: 'key=\"value with , = # or other special characters\"'"
_NOISE = re.compile(r"\s*\n\s*(full_key:|See https?://|Config search path:|Available options in).*", re.DOTALL)


def explain(error: Exception, arguments: Sequence[str] = ()) -> Problem:
    """The problem that `error` tells of; `arguments` is the command line, for errors that do not name theirs."""
    text = _NOISE.sub("", str(error)).strip()
    options, override = getattr(error, "options", None), getattr(error, "override", None)
    if options:
        group, _, choice = str(getattr(error, "missing_cfg_file", "")).rpartition("/")
        return _no_choice(group, choice, options)
    if override is not None:
        fix = "write key=value" if "missing EQUAL" in text else QUOTING
        return Problem(str(override).partition("=")[0].strip() or "command line", str(override), text, fix)
    if text.startswith("Config group override must be"):
        return _bad_group(text, arguments)
    if match := re.match(r"Ambiguous value for argument '(.*)'\n", text):
        return Problem(match[1].partition("=")[0].lstrip("+"), match[1], text, QUOTING)
    if match := re.match(r"Could not override '(.+)'\.\nTo append to your config use \+(.*)", text):
        return Problem(match[1], match[2], "there is no such option or group", legal_names(match[1]))
    if match := re.match(r"Multiple values for (\S+)\. ", text):
        return Problem(match[1], f"+{match[1]}=...", "it already has a choice", f"use {match[1]}=CHOICE, without +")
    if match := re.match(r"Could not (?:override|delete)\D*'(.+?)'", text):
        return Problem(match[1], _first_line(text), text, legal_names(match[1]))
    return _from_omegaconf(error, text)


def groups() -> dict[str, list[str]]:
    """{group: its choices}: the folders of conf/ and the files in each."""
    folders = sorted(entry for entry in CONF.iterdir() if entry.is_dir())
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def legal_names(key: str) -> str:
    """What could be meant by the unknown `key`: the nearest names, and all names of its section."""
    paths, section = list(option_types()), key.rpartition(".")[0]
    near = difflib.get_close_matches(key, paths if section else [*paths, *groups()], n=3, cutoff=0.6)
    hints = [f"did you mean {' or '.join(near)}?"] if near else []
    siblings = [path for path in paths if section and path.startswith(f"{section}.")]
    if siblings:
        hints.append(f"options here: {', '.join(siblings)}")
    elif section == "data":
        hints.append(f"each kind of data has options of its own: see conf/data/ and data={', '.join(groups()['data'])}")
    else:
        hints.append(f"groups: {', '.join(groups())}; see python launch.py --help for every option")
    return " ".join(hints)


def _from_omegaconf(error: Exception, text: str) -> Problem:
    key, value = str(getattr(error, "full_key", None) or ""), getattr(error, "value", None)
    if "missing mandatory value" in text.lower():
        return Problem(key, "nothing", "it has no default", f"add {key}=VALUE")
    if match := re.match(r"Key '(.+)' (?:is )?not in ", text):
        return Problem(key or match[1], f"+{key}", "there is no such option", legal_names(key or match[1]))
    if match := re.match(r"Interpolation key '(.+)' not found", text):
        return Problem(key or "command line", f"${{{match[1]}}}", "no option has this name", legal_names(match[1]))
    got = repr(value) if value is not None else _first_line(text)
    kind = option_types().get(key)
    fix = f"give {key} a value of type {kind}" if kind else "see python launch.py --help for groups and options"
    return Problem(key or "command line", got, text, fix)


def _bad_group(text: str, arguments: Sequence[str]) -> Problem:
    """Hydra refuses group=3 and group=null without naming the group."""
    for argument in arguments:
        group, _, choice = argument.partition("=")
        if group in groups() and choice not in groups()[group]:
            return _no_choice(group, choice, groups()[group])
    return Problem("command line", " ".join(arguments), text, "use group=choice or option=value")


def _no_choice(group: str, choice: str, options: Sequence[str]) -> Problem:
    named = ", ".join(f"{group}={option}" for option in options)
    return Problem(group, choice, f"conf/{group} has no file {choice}.yaml", f"use {named}")


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else "nothing"
