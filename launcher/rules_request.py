"""Rules about the request itself: words, counts, launcher and tracker options; nothing of DeepSpeed's engine.

One function each, listed in `launcher.rules`. Must never warn: what cannot be honoured is refused with its fix.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from launcher.cluster.filters import spec
from launcher.cluster.value import Cluster
from launcher.env import SECRET
from launcher.errors import Problem
from launcher.schema import ExportSection, RunConfig

MODES = ("train", "plan", "check", "explain", "audit")
RECIPES = ("pretrain", "finetune", "profile", "custom", "resume", "export")
LAUNCHERS = ("pdsh", "openmpi", "mpich", "slurm")


def mode_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.mode in MODES:
        return None
    return Problem("mode", config.mode, "not a mode", f"use mode={' or mode='.join(MODES)}")


def recipe_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.recipe.name in RECIPES:
        return None
    return Problem("recipe.name", config.recipe.name, "not a recipe", f"use recipe={' or recipe='.join(RECIPES)}")


def recipe_target_is_that_of_a_custom_recipe(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    target = config.recipe.target
    if (config.recipe.name == "custom") == (target is not None):
        return None
    if target is None:
        return Problem("recipe.target", "null", "recipe=custom calls it", "add recipe.target=MODULE.NAME")
    why = f"recipe={config.recipe.name} does not read it"
    return Problem("recipe.target", target, why, "add recipe=custom, or leave it out")


def launcher_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    name = config.cluster.launcher
    if name in LAUNCHERS:
        return None
    return Problem("cluster.launcher", name, "not a launcher of DeepSpeed's", f"use {', '.join(LAUNCHERS)}")


def launcher_can_place_the_ranks(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """deepspeed 0.19.8 launcher/multinode_runner.py: only pdsh pins slots; mpich and slurm want equal hosts."""
    name = config.cluster.launcher
    if cluster.local or name == "pdsh" or name not in LAUNCHERS:
        return None
    got = spec({host.name: host.slots for host in cluster.hosts})
    if any(host.slots != tuple(range(len(host.slots))) for host in cluster.hosts):
        why = f"{name} starts processes by count and cannot choose slots"
        return Problem("cluster.launcher", f"{name} for {got}", why, "choose whole hosts, or use cluster.launcher=pdsh")
    if name in ("mpich", "slurm") and cluster.slots_per_host is None:
        why = f"{name} starts as many processes on every host"
        return Problem("cluster.launcher", f"{name} for {got}", why, "choose equal hosts, or use cluster.launcher=pdsh")
    return None


def launcher_needs_hosts(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """Processes of this machine alone are started without a runner: cluster.launcher would be ignored."""
    if not cluster.local or config.cluster.launcher not in LAUNCHERS[1:]:
        return None
    return Problem(
        "cluster.launcher",
        config.cluster.launcher,
        "it only applies to several hosts",
        "remove it or use cluster=hostfile",
    )


def run_folder_survives_the_remote_shell(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """pdsh replaces %h, %n and %u in the command it sends, and a shell on each host reads the rest."""
    path = config.run.dir or f"{config.run.root}/{config.run.name or ''}".rstrip("/")
    found = sorted(set(re.findall(r"[%$`\"'\\;&|<>()*?\[\]{}\x00-\x1f]", path)))
    if cluster.local or config.cluster.launcher != "pdsh" or not found:
        return None
    return Problem(
        "run.dir",
        path,
        f"pdsh or the shell of another host would replace or expand {' '.join(map(repr, found))}",
        "use letters, digits, spaces and . _ - + = @ in the run's folder",
    )


def plan_format_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.plan.format in ("text", "json"):
        return None
    return Problem("plan.format", config.plan.format, "not a format", "use plan.format=text or plan.format=json")


def check_format_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.check.format in ("text", "json"):
        return None
    return Problem("check.format", config.check.format, "not a format", "use check.format=text or check.format=json")


def batch_job_needs_slurm(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """sbatch is Slurm's; what it would be asked for means nothing elsewhere."""
    launch, found = config.launch, []
    if launch.submit not in ("none", "sbatch"):
        found.append(Problem("launch.submit", launch.submit, "not a way to submit", "use launch.submit=sbatch or none"))
    if launch.submit == "sbatch" and config.cluster.kind != "slurm":
        found.append(Problem("launch.submit", "sbatch", "it hands the run to Slurm", "add cluster=slurm"))
    if launch.submit != "sbatch":
        found += [
            Problem(
                f"launch.{name}", str(value), "it is for batch jobs, so it would be ignored", "add launch.submit=sbatch"
            )
            for name, value in (("nodes", launch.nodes), ("slots", launch.slots), ("sbatch", launch.sbatch))
            if value
        ]
    return found


def no_secret_in_the_request(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """What is asked for is written to the run folder, for everyone who may read it."""
    return [
        Problem(
            f"cluster.env.{name}",
            "(not shown)",
            "it looks like a secret, and requests are recorded in the run folder",
            f"export {name} in the shell: secrets that are known by name reach every rank from there",
        )
        for name in config.cluster.env
        if SECRET.search(name)
    ]


def tracker_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.tracker.kind in ("none", "wandb"):
        return None
    return Problem("tracker.kind", config.tracker.kind, "not a tracker", "use tracker=none or tracker=wandb")


def tracker_options_need_a_tracker(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """With tracker=none nothing reads them."""
    if config.tracker.kind != "none":
        return []
    given = {name: getattr(config.tracker, name) for name in ("project", "entity", "group", "tags")}
    return [
        Problem(f"tracker.{name}", str(value), "no tracker is chosen, so it would be ignored", "add tracker=wandb")
        for name, value in given.items()
        if value
    ]


def counts_are_positive(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    least = {
        "run.steps": (config.run.steps, 1),
        "train.sequence_length": (config.train.sequence_length, 2),
        "train.fallback_micro_batch_size": (config.train.fallback_micro_batch_size, 1),
        "eval.every": (config.eval.every, 0),
        "eval.samples": (config.eval.samples, 0),
        "eval.patience": (config.eval.patience, 0),
        "checkpoint.every": (config.checkpoint.every, 0),
        "checkpoint.keep": (config.checkpoint.keep, 0),
        "checkpoint.keep_every": (config.checkpoint.keep_every, 0),
        "check.timeout_s": (config.check.timeout_s, 1),
        "watch.stall_s": (config.watch.stall_s, 1),
        "watch.grace_s": (config.watch.grace_s, 1),
        "watch.slow_factor": (config.watch.slow_factor, 1.1),
        "cluster.restarts": (config.cluster.restarts, 0),
    }
    return [
        Problem(where, str(value), f"it is at least {minimum}", f"{where}={minimum} or more")
        for where, (value, minimum) in least.items()
        if value < minimum
    ]


def numbers_are_finite(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """JSON has no infinity and no NaN: neither the plan nor DeepSpeed's file could hold one."""
    return [
        Problem(path, str(value), "it is not a finite number", f"give {path} a finite number, or leave it out")
        for path, value in _leaves(dataclasses.asdict(config))
        if isinstance(value, float) and not math.isfinite(value)
    ]


def export_is_sound(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    return export_problems(config.export)


def export_problems(export: ExportSection) -> list[Problem]:
    """What is wrong with the options of an export, whatever is exported."""
    found = []
    if export.dtype not in ("fp32", "bf16", "fp16"):
        found.append(Problem("export.dtype", export.dtype, "not an element type", "use fp32, bf16 or fp16"))
    if export.lora not in ("merged", "adapter"):
        why = "not a form of a LoRA run's weights"
        found.append(Problem("export.lora", export.lora, why, "use merged or adapter"))
    if export.weights not in ("trained", "ema"):
        found.append(Problem("export.weights", export.weights, "not a kind of weights", "use trained or ema"))
    if export.best and export.step is not None:
        why = "the best checkpoint is one, this step another"
        found.append(Problem("export.step", str(export.step), why, "name the step, or say export.best=true"))
    if export.max_shard_bytes < 1:
        given, fix = str(export.max_shard_bytes), "export.max_shard_bytes=1 or more"
        found.append(Problem("export.max_shard_bytes", given, "it is at least 1", fix))
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in `value` that is neither a mapping nor a list."""
    if not isinstance(value, dict | list):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, f"{path}.{key}" if path else str(key))
