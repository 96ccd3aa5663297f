"""Hydra's config -> RunConfig: types, absolute paths, stored runs. The only file that touches OmegaConf.

Called by `launcher.cli` inside Hydra's entry; for resume and export it composes the stored request again.
Must never start or write anything.
"""

from __future__ import annotations

import difflib
import json
import re
import time
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher import env
from launcher.errors import Problem, UserError
from launcher.rundir import RunDir
from launcher.schema import RunConfig, option_paths

FREE_MAPS = ("deepspeed", "model.config", "cluster.env")
PATH_KEYS_DATA = ("files", "validation_files", "train", "validation", "tokenizer", "cache_dir", "data_files")
# What a resumed run keeps from the run it continues: a change would make it another experiment.
FIXED_ON_RESUME = (
    "model",
    "data",
    "train.sequence_length",
    "run.seed",
    "train.global_batch_size",
    "deepspeed.optimizer.type",
)


def to_run_config(cfg: DictConfig) -> RunConfig:
    """Typed, resolved request with absolute paths; raises UserError naming the option and its type."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), cfg)
        OmegaConf.resolve(merged)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(describe(error)) from None
    assert isinstance(config, RunConfig)
    _absolute_paths(config)
    _model_from_path(config)
    return config


def stored_overrides(run: RunDir) -> list[str]:
    """The overrides a run was started with, one per line of overrides.txt."""
    return [line for line in run.overrides.read_text(encoding="utf-8").splitlines() if line]


def recompose(run: RunDir, new_overrides: list[str], recipe: str) -> tuple[DictConfig, list[str]]:
    """The stored request of `run` with `new_overrides` on top, and the override list that describes it.

    Three-way: what the new overrides change against the old ones is applied to the stored config.yaml, so
    files of conf/ that changed since then do not change the run.
    """
    old = stored_overrides(run)
    added = [text for text in new_overrides if _key(text) not in ("recipe", "run.dir", "mode", "plan.format")]
    replaced = {_key(text) for text in added}
    combined = [text for text in old if _key(text) not in replaced] + added
    stored = OmegaConf.load(run.config)
    before = hydra_compose("config", old)
    after = hydra_compose("config", combined)
    result = _plain(stored)
    _apply_difference(result, _plain(before), _plain(after))
    result["recipe"] = {"name": recipe}
    result["run"]["dir"] = str(run.path)
    return OmegaConf.create(result), combined


def refuse_changes(stored: RunConfig, wanted: RunConfig) -> list[Problem]:
    """What may not change when a run is resumed, by name."""
    problems = []
    old, new = _flatten(_as_dict(stored)), _flatten(_as_dict(wanted))
    for path in sorted(old.keys() | new.keys()):
        fixed = any(path == name or path.startswith(name + ".") for name in FIXED_ON_RESUME)
        if fixed and old.get(path) != new.get(path) and path != "data.cache_dir":
            problems.append(
                Problem(
                    path,
                    f"{new.get(path)!r}, the run has {old.get(path)!r}",
                    "a resumed run keeps its model, data, seed, batch and optimizer",
                    "leave it out, or start a new run",
                )
            )
    return problems


def composed_yaml(config: RunConfig) -> str:
    """config.yaml of the run folder: the request, fully resolved."""
    return OmegaConf.to_yaml(OmegaConf.create(_as_dict(config)))


def auto_name(config: RunConfig) -> str:
    """Name of a run whose folder was not given: time, model, stage and offload."""
    zero = config.deepspeed.get("zero_optimization", {})
    parts = [time.strftime("%Y%m%d-%H%M%S"), config.model.name, f"z{zero.get('stage', 0)}"]
    for what in ("optimizer", "param"):
        device = (zero.get(f"offload_{what}") or {}).get("device")
        if device:
            parts.append(f"{what[:3]}-{device}")
    return "-".join(parts)


def describe(error: Exception) -> Problem:
    """One Problem from an exception of Hydra or OmegaConf, with the legal names next to it."""
    text = str(error).split("\nfull_key:")[0].strip()
    text = re.sub(r"\n?See https?://\S+.*", "", text, flags=re.DOTALL).strip()
    cause = error.__cause__
    if cause is not None and "not in struct" in str(cause):
        text += "\n" + str(cause).splitlines()[0]
    where = getattr(error, "full_key", None) or _first_quoted(text) or "command line"
    got = repr(getattr(error, "value", None)) if getattr(error, "value", None) is not None else _first_line(text)
    return Problem(str(where), got, text, _suggestion(str(where), error))


def rewrite_overrides(arguments: list[str]) -> list[str]:
    """Makes keys of free-form maps settable with or without a leading `+`: Hydra tells them apart, users need not."""
    rewritten = []
    for text in arguments:
        bare = text.lstrip("+")
        free = not text.startswith("-") and bare.startswith(tuple(f"{name}." for name in FREE_MAPS))
        rewritten.append(f"++{bare}" if free and "=" in bare else text)
    return rewritten


def _suggestion(where: str, error: Exception) -> str:
    paths = option_paths()
    key = where.lstrip("+~").split("=")[0].split("@")[0]
    near = difflib.get_close_matches(key, paths, n=3, cutoff=0.6)
    parent = key.rpartition(".")[0]
    siblings = [path for path in paths if parent and path.startswith(parent + ".")]
    if "Missing mandatory value" in str(error):
        return f"add {key}=..."
    if isinstance(error, HydraException) and "Available options" in str(error):
        return "use one of the options listed above"
    if near and key not in paths:
        return f"did you mean {' or '.join(near)}?"
    if siblings and key not in paths:
        return f"options here: {', '.join(siblings)}"
    if isinstance(error, HydraException) and ("mismatched input" in str(error) or "token recognition" in str(error)):
        return "quote the value for Hydra inside the shell's quotes: 'key=\"value with , or special characters\"'"
    return "see python launch.py --help for groups, options and their types"


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else "nothing"


def _first_quoted(text: str) -> str | None:
    match = re.search(r"'([^']+)'", text)
    return match[1] if match else None


def _key(override: str) -> str:
    """Key or group of an override, without +, ~ and package."""
    parsed = OverridesParser.create().parse_override(override)
    return str(parsed.key_or_group)


def _plain(cfg: Any) -> Any:
    return OmegaConf.to_container(cfg, resolve=True)


def _as_dict(config: RunConfig) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(config)


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _apply_difference(target: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> None:
    """Changes `target` by what differs between `before` and `after`; keys only `target` lacks are added."""
    for key in before.keys() | after.keys():
        if key not in after:
            target.pop(key, None)
        elif isinstance(after[key], dict) and isinstance(before.get(key), dict) and isinstance(target.get(key), dict):
            _apply_difference(target[key], before[key], after[key])
        elif key not in before or before[key] != after[key] or key not in target:
            target[key] = after[key]


def _absolute_paths(config: RunConfig) -> None:
    """Relative paths mean the folder the command was typed in; workers may run elsewhere."""
    config.run.root = _absolute(config.run.root)
    for section, names in (
        (config.run, ("dir",)),
        (config.model, ("path",)),
        (config.cluster, ("hostfile",)),
        (config.export, ("dir",)),
    ):
        for name in names:
            value = getattr(section, name)
            if value is not None:
                setattr(section, name, _absolute(value))
    for key in PATH_KEYS_DATA:
        value = config.data.get(key)
        if isinstance(value, str):
            config.data[key] = _absolute(value)
        elif isinstance(value, list):
            config.data[key] = [_absolute(str(item)) for item in value]
    if config.data.get("cache_dir", "") is None:
        config.data["cache_dir"] = str(env.cache_dir() / "data")
    if config.data.get("kind") == "hub" and Path(str(config.data.get("path"))).exists():
        config.data["path"] = _absolute(str(config.data["path"]))
    zero = config.deepspeed.get("zero_optimization")
    for what in ("optimizer", "param"):
        block = zero.get(f"offload_{what}") if isinstance(zero, dict) else None
        if isinstance(block, dict) and isinstance(block.get("nvme_path"), str):
            block["nvme_path"] = _absolute(block["nvme_path"])


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _model_from_path(config: RunConfig) -> None:
    """Merges config.json of `model.path` under the fields of `model.config`."""
    if config.model.path is None:
        if not config.model.config.get("model_type"):
            raise UserError(
                Problem(
                    "model.config",
                    str(config.model.config),
                    "a configuration names its family in model_type",
                    "add model.config.model_type=llama (or another family), or model.path=FOLDER",
                )
            )
        return
    path = Path(config.model.path)
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise UserError(
            Problem(
                "model.path",
                str(path),
                f"no Hugging Face configuration can be read from {file}: {reason}",
                "name a local folder with config.json; nothing is downloaded at run time",
            )
        ) from None
    if not isinstance(fields, dict) or not fields.get("model_type"):
        raise UserError(Problem("model.path", str(file), "it has no model_type", "name the config.json of a model"))
    config.model.config = fields | config.model.config
