"""Cross-field rules, one function each: (RunConfig, Cluster, DeepSpeed dict) -> Problem, a list of them, or None.

Called when a plan is built, all of them, so that every problem is reported at once.
Must never warn: what cannot be honoured is refused here with its fix.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from launcher.cluster.filters import spec
from launcher.cluster.value import Cluster
from launcher.ds_config import offload_device, precision, zero_stage
from launcher.errors import Problem
from launcher.schema import RunConfig

Rule = Callable[[RunConfig, Cluster, dict[str, Any]], Problem | list[Problem] | None]
MODES = ("train", "plan")
RECIPES = ("pretrain", "resume", "export")
LAUNCHERS = ("pdsh", "openmpi", "mpich", "slurm")


def judge(config: RunConfig, cluster: Cluster, deepspeed: dict[str, Any]) -> list[Problem]:
    """Every rule's problems, in the order of RULES."""
    problems: list[Problem] = []
    for rule in RULES:
        found = rule(config, cluster, deepspeed)
        problems += found if isinstance(found, list) else [found] if found is not None else []
    return problems


def stage_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    stage = zero_stage(ds)
    if stage in (0, 1, 2, 3):
        return None
    return Problem("deepspeed.zero_optimization.stage", str(stage), "ZeRO has stages 0 to 3", "use zero=stage0..stage3")


def offload_optimizer_needs_a_stage(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    device, stage = offload_device(ds, "optimizer"), zero_stage(ds)
    if device is None or stage >= 1:
        return None
    return Problem(
        "offload",
        f"offload_optimizer.device={device} at stage {stage}",
        "stage 0 keeps the optimizer whole on the device; DeepSpeed would ignore the offload",
        "use zero=stage1, stage2 or stage3, or offload=none",
    )


def offload_param_needs_stage3(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    device, stage = offload_device(ds, "param"), zero_stage(ds)
    if device is None or stage == 3:
        return None
    return Problem(
        "offload",
        f"offload_param.device={device} at stage {stage}",
        "only stage 3 partitions parameters; DeepSpeed would ignore the offload",
        "use zero=stage3, or offload=cpu (optimizer only)",
    )


def nvme_needs_stage3(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    stage = zero_stage(ds)
    if "nvme" not in (offload_device(ds, "optimizer"), offload_device(ds, "param")) or stage == 3:
        return None
    return Problem(
        "offload",
        f"nvme at stage {stage}",
        "below stage 3 DeepSpeed quietly keeps the optimizer in host memory instead of on the disk",
        "use zero=stage3, or offload=cpu",
    )


def nvme_needs_a_path(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    zero = ds.get("zero_optimization", {})
    for what in ("optimizer", "param"):
        block = zero.get(f"offload_{what}") or {}
        if block.get("device") == "nvme" and not block.get("nvme_path"):
            where = f"deepspeed.zero_optimization.offload_{what}.nvme_path"
            return Problem(where, "nothing", "offload to NVMe needs a folder", f"{where}=/path/on/a/local/disk")
    return None


def zeropp_needs_stage3(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    keys, stage = _zeropp_keys(ds), zero_stage(ds)
    if not keys or stage == 3:
        return None
    return Problem(
        "zeropp",
        f"{', '.join(keys)} at stage {stage}",
        "ZeRO++ works on partitioned parameters; DeepSpeed would ignore it",
        "use zero=stage3, or zeropp=off",
    )


def quantised_zeropp_needs_cuda(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    keys = [key for key in _zeropp_keys(ds) if "quantized" in key]
    if not keys or cluster.accelerator == "cuda":
        return None
    return Problem(
        "zeropp",
        f"{', '.join(keys)} on {cluster.accelerator}",
        "the quantisation kernels exist for CUDA only",
        "use zeropp=off or hpz",
    )


def quantised_gradients_need_hosts(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if not ds.get("zero_optimization", {}).get("zero_quantized_gradients") or len(cluster.hosts) > 1:
        return None
    return Problem(
        "zeropp",
        "zero_quantized_gradients on one host",
        "DeepSpeed falls back to the plain reduce-scatter when there is one host",
        "use zeropp=off here, or several hosts",
    )


def hpz_divides_the_world(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    size = ds.get("zero_optimization", {}).get("zero_hpz_partition_size")
    # "auto" stands here only while another problem keeps it from being solved
    if size in (None, "auto") or (
        isinstance(size, int) and 1 <= size <= cluster.world_size and not cluster.world_size % size
    ):
        return None
    return Problem(
        "deepspeed.zero_optimization.zero_hpz_partition_size",
        str(size),
        f"it must divide the {cluster.world_size} ranks",
        "use zeropp=hpz, which takes the slots of a host",
    )


def one_reduced_precision(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if not (ds.get("bf16", {}).get("enabled") and ds.get("fp16", {}).get("enabled")):
        return None
    return Problem("precision", "bf16 and fp16", "DeepSpeed takes one", "use precision=bf16 or precision=fp16")


def stage0_reduced_precision_decays_at_start(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """deepspeed 0.19.8 fp16/fused_optimizer.py `initialize_optimizer_states` steps once on zero gradients."""
    kind = precision(ds)
    if kind == "fp32" or zero_stage(ds) != 0:
        return None
    return Problem(
        "precision",
        f"{kind} at stage 0",
        "DeepSpeed's 16-bit optimizer of stage 0 takes a step on zero gradients when it is built: weight decay and "
        "Adam's bias correction run one step ahead, and the curve differs from stages 1 to 3",
        "use zero=stage1 (same traffic, less memory), or precision=fp32",
    )


def lion_on_cpu_needs_offload(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if _optimizer(ds) != "lion" or cluster.accelerator != "cpu" or offload_device(ds, "optimizer") is not None:
        return None
    return Problem("optim", "lion on cpu", "FusedLion has no CPU kernel", "use offload=cpu, or optim=adamw")


def muon_at_stage3_needs_plain_reduction(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if _optimizer(ds) != "muon" or zero_stage(ds) != 3:
        return None
    if ds.get("zero_optimization", {}).get("reduce_scatter") is False:
        return None
    return Problem(
        "optim",
        "muon at stage 3",
        "Muon needs whole gradients, which the reduce-scatter of stage 3 does not give",
        "add +deepspeed.zero_optimization.reduce_scatter=false, or use zero=stage2",
    )


def adagrad_cannot_resume_at_stage3(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if _optimizer(ds) != "adagrad" or zero_stage(ds) != 3:
        return None
    return Problem(
        "optim",
        "adagrad at stage 3",
        "DeepSpeed cannot load its optimizer state again, so the run could not be resumed",
        "use zero=stage2, or optim=adamw",
    )


def warmup_fits_the_run(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    params = ds.get("scheduler", {}).get("params", {})
    warmup, total = params.get("warmup_num_steps"), params.get("total_num_steps")
    if warmup in (None, "auto") or total is None or warmup <= total:
        return None
    return Problem(
        "deepspeed.scheduler.params.warmup_num_steps",
        str(warmup),
        f"the run has {total} steps",
        f"use {max(total // 10, 1)} or fewer, a longer run.steps, or schedule=constant",
    )


def mode_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.mode in MODES:
        return None
    return Problem("mode", config.mode, "not a mode", f"use mode={' or mode='.join(MODES)}")


def recipe_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.recipe.name in RECIPES:
        return None
    return Problem("recipe.name", config.recipe.name, "not a recipe", f"use recipe={' or recipe='.join(RECIPES)}")


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


def tracker_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.tracker.kind in ("none", "wandb"):
        return None
    return Problem("tracker.kind", config.tracker.kind, "not a tracker", "use tracker=none or tracker=wandb")


def counts_are_positive(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    least = {
        "run.steps": (config.run.steps, 1),
        "train.sequence_length": (config.train.sequence_length, 2),
        "train.fallback_micro_batch_size": (config.train.fallback_micro_batch_size, 1),
        "eval.every": (config.eval.every, 0),
        "eval.samples": (config.eval.samples, 0),
        "checkpoint.every": (config.checkpoint.every, 0),
        "checkpoint.keep": (config.checkpoint.keep, 0),
        "export.max_shard_bytes": (config.export.max_shard_bytes, 1),
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


def export_dtype_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.export.dtype in ("fp32", "bf16", "fp16"):
        return None
    return Problem("export.dtype", config.export.dtype, "not an element type", "use fp32, bf16 or fp16")


def sequence_fits_the_model(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    limit = config.model.config.get("max_position_embeddings", config.model.config.get("n_positions"))
    if not isinstance(limit, int) or config.train.sequence_length <= limit:
        return None
    return Problem(
        "train.sequence_length",
        str(config.train.sequence_length),
        f"the model has {limit} positions",
        f"use {limit} or fewer, or another model",
    )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in `value` that is neither a mapping nor a list."""
    if not isinstance(value, dict | list):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _zeropp_keys(ds: dict[str, Any]) -> list[str]:
    zero = ds.get("zero_optimization", {})
    chosen = {
        "zero_hpz_partition_size": zero.get("zero_hpz_partition_size") not in (None, 1),
        "zero_quantized_weights": bool(zero.get("zero_quantized_weights")),
        "zero_quantized_gradients": bool(zero.get("zero_quantized_gradients")),
    }
    return [key for key, is_chosen in chosen.items() if is_chosen]


def _optimizer(ds: dict[str, Any]) -> str:
    return str(ds.get("optimizer", {}).get("type", "")).lower()


RULES: tuple[Rule, ...] = (
    mode_is_known,
    recipe_is_known,
    launcher_is_known,
    launcher_can_place_the_ranks,
    run_folder_survives_the_remote_shell,
    plan_format_is_known,
    tracker_is_known,
    counts_are_positive,
    numbers_are_finite,
    export_dtype_is_known,
    sequence_fits_the_model,
    stage_is_known,
    offload_optimizer_needs_a_stage,
    offload_param_needs_stage3,
    nvme_needs_stage3,
    nvme_needs_a_path,
    zeropp_needs_stage3,
    quantised_zeropp_needs_cuda,
    quantised_gradients_need_hosts,
    hpz_divides_the_world,
    one_reduced_precision,
    stage0_reduced_precision_decays_at_start,
    lion_on_cpu_needs_offload,
    muon_at_stage3_needs_plain_reduction,
    adagrad_cannot_resume_at_stage3,
    warmup_fits_the_run,
)
