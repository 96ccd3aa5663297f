"""Hydra's config -> RunConfig: types, absolute paths, stored runs. The only file that touches OmegaConf.

Called by `launcher.cli` inside Hydra's entry; for resume and export it composes the stored request again.
Must never start or write anything.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher import env
from launcher.ds_file import Folded, fold, leaves, take_batch
from launcher.errors import Problem, UserError
from launcher.explain import explain, groups
from launcher.model_source import complete_model
from launcher.rundir import RunDir
from launcher.schema import RunConfig

FREE_MAPS = ("deepspeed", "model.config", "data.config", "cluster.env", "train.objectives", "parameters.norms")
PATH_KEYS_DATA = (
    *("files", "validation_files", "train", "validation", "data_files"),
    *("tokenizer", "chat_template", "cache_dir"),
)
# What a command line says for itself alone when it continues a run.
NOT_STORED = (
    "recipe",
    "run.dir",
    "mode",
    *(f"plan.{name}" for name in ("format", "compare", "scale", "html", "force")),
)


def to_run_config(cfg: DictConfig) -> RunConfig:
    """Typed, resolved request with absolute paths; raises UserError naming the option and its type."""
    return typed(cfg)[0]


def typed(cfg: DictConfig) -> tuple[RunConfig, Folded | None]:
    """The same, and how `deepspeed.file` entered it. In the request itself the file's keys stand among the others."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), cfg)
        OmegaConf.resolve(merged)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from None
    assert isinstance(config, RunConfig)
    folded = _fold_deepspeed_file(config)
    _absolute_paths(config)
    complete_model(config.model)
    return config, folded


def typed_overrides(task: Any) -> list[str]:
    """The overrides as they were typed: `${...}` in one is resolved where it lands in the config, not in the text."""
    texts: Any = OmegaConf.to_container(task, resolve=False)
    return [str(text) for text in texts]


def typed_paths(overrides: list[str]) -> list[tuple[str, bool]]:
    """(option, whether it is deleted) of every override that is no choice of a group; a block gives its own options."""
    parser, found = OverridesParser.create(), []
    for text in overrides:
        parsed = parser.parse_override(text)
        name, value = parsed.key_or_group, parsed.value() if not parsed.is_delete() else None
        if name.partition(".")[0] == "hydra" or name in groups():
            continue
        inner = [path for path, _ in leaves(value)] if isinstance(value, dict) else []
        found += [(f"{name}.{path}", False) for path in inner] or [(name, parsed.is_delete())]
    return found


def stored_overrides(run: RunDir) -> list[str]:
    """The overrides a run was started with, one per line of overrides.txt."""
    return [line for line in run.overrides.read_text(encoding="utf-8").splitlines() if line]


def recompose(
    run: RunDir, new_overrides: list[str], recipe: str
) -> tuple[DictConfig, list[str], dict[str, str | None]]:
    """The stored request of `run` with `new_overrides` on top, the override list that describes it, and its choices.

    Three-way: what the new overrides change against the old ones is applied to the stored config.yaml, so
    files of conf/ that changed since then do not change the run.
    """
    old = stored_overrides(run)
    added = [text for text in new_overrides if _key(text) not in NOT_STORED]
    replaced = {_key(text) for text in added}
    combined = [text for text in old if _key(text) not in replaced] + added
    stored = OmegaConf.load(run.config)
    before = hydra_compose("config", old)
    with_hydra = hydra_compose("config", combined, return_hydra_config=True)
    choices = dict(with_hydra.hydra.runtime.choices)
    after = OmegaConf.masked_copy(with_hydra, [str(key) for key in with_hydra if key != "hydra"])
    if "deepspeed.file" in replaced:
        why = "the run keeps the DeepSpeed keys it was started with; its config.yaml holds them all"
        raise UserError(Problem("deepspeed.file", str(run.path), why, "set keys one by one: deepspeed.KEY=VALUE"))
    result = _plain(stored)
    _apply_difference(result, _plain(before), _plain(after))
    result["deepspeed"].pop("file", None)  # what it held was stored with the rest
    result["recipe"] = {"target": None} | result["recipe"] | {"name": recipe}
    result["run"]["dir"] = str(run.path)
    return OmegaConf.create(result), combined, choices


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


def rewrite_overrides(arguments: list[str]) -> list[str]:
    """Makes keys of free-form maps settable with or without a leading `+`: Hydra tells them apart, users need not.

    And takes `checkpoint.async`, which no field of a Python class can be called, for `checkpoint.background`, and
    `plan.scale=8,16` for the list it means, which Hydra would take for a sweep.
    """
    rewritten = []
    for text in arguments:
        if text.lstrip("+").startswith("checkpoint.async="):
            text = text.replace("async", "background", 1)
        if text.startswith("plan.scale=") and text[len("plan.scale=") :][:1].isdecimal():
            text = f"plan.scale=[{text.partition('=')[2]}]"
        bare = text.lstrip("+")
        starts = tuple(f"{name}{after}" for name in FREE_MAPS for after in (".", "={"))
        free = not text.startswith("-") and bare.startswith(starts)
        rewritten.append(f"++{bare}" if free and "=" in bare else text)
    return rewritten


def _key(override: str) -> str:
    """Key or group of an override, without +, ~ and package."""
    parsed = OverridesParser.create().parse_override(override)
    return str(parsed.key_or_group)


def _plain(cfg: Any) -> Any:
    return OmegaConf.to_container(cfg, resolve=True)


def _as_dict(config: RunConfig) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(config)


def _apply_difference(target: dict[str, Any], before: dict[str, Any], after: dict[str, Any], path: str = "") -> None:
    """Changes `target` by what differs between `before` and `after`; options that only it lacks are added.

    They are newer than what is stored. A key of a free map is none: what conf/ gained there is not the run's.
    """
    for key in before.keys() | after.keys():
        inner = f"{path}.{key}".lstrip(".")
        if key not in after:
            target.pop(key, None)
        elif isinstance(after[key], dict) and isinstance(before.get(key), dict) and isinstance(target.get(key), dict):
            _apply_difference(target[key], before[key], after[key], inner)
        elif key not in before or before[key] != after[key] or (key not in target and not _is_free(path)):
            target[key] = after[key]


def _is_free(path: str) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in FREE_MAPS)


def _absolute_paths(config: RunConfig) -> None:
    """Relative paths mean the folder the command was typed in; workers may run elsewhere."""
    config.run.root = _absolute(config.run.root)
    for section, names in (
        (config.run, ("dir", "source")),
        (config.model, ("path", "init_from")),
        (config.cluster, ("hostfile",)),
        (config.hardware, ("file",)),
        (config.export, ("dir", "source")),
        (config.plan, ("html",)),
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


def _fold_deepspeed_file(config: RunConfig) -> Folded | None:
    """Puts the keys of `deepspeed.file` beneath those of the groups and the command line."""
    path = config.deepspeed.pop("file", None)
    if path is None:
        return None
    if not isinstance(path, str):
        raise UserError(Problem("deepspeed.file", repr(path), "not a path", "deepspeed.file=PATH"))
    folded = fold(_absolute(path), config.deepspeed)
    take_batch(folded, config.train)
    config.deepspeed = folded.deepspeed
    return folded


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
