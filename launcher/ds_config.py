"""RunConfig + Cluster + Batch -> the DeepSpeed dict that the engine gets.

Called when a plan is built. Fills only what depends on the cluster or the run's length; the rest is the groups' own.
Must never restate a DeepSpeed default: what the user did not choose is absent.
"""

from __future__ import annotations

import copy
from typing import Any

from launcher.batch import Batch
from launcher.cluster.value import Cluster
from launcher.errors import Problem, UserError
from launcher.schema import RunConfig

LONGEST_AUTO_WARMUP = 2000  # optimizer steps; what published runs of any length use at most
BATCH_KEYS = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
}


def build(config: RunConfig, cluster: Cluster, batch: Batch) -> dict[str, Any]:
    """The complete DeepSpeed dict; `config` is not changed."""
    given = [key for key in BATCH_KEYS if key in config.deepspeed]
    if given:
        raise UserError(
            *(
                Problem(
                    f"deepspeed.{key}", str(config.deepspeed[key]), "the batch has one owner", f"use {BATCH_KEYS[key]}"
                )
                for key in given
            )
        )
    result = copy.deepcopy(config.deepspeed)
    result["train_batch_size"] = batch.global_batch_size
    result["train_micro_batch_size_per_gpu"] = batch.micro_batch_size
    result["gradient_accumulation_steps"] = batch.gradient_accumulation_steps
    _fill_schedule(result, config.run.steps)
    _fill_hpz(result, cluster)
    return result


def zero_stage(deepspeed: dict[str, Any]) -> int:
    """The ZeRO stage that `deepspeed` asks for; DeepSpeed reads an absent block as stage 0."""
    return int(deepspeed.get("zero_optimization", {}).get("stage", 0))


def precision(deepspeed: dict[str, Any]) -> str:
    """bf16, fp16 or fp32: the element type of weights and gradients that `deepspeed` asks for."""
    for name in ("bf16", "fp16"):
        if deepspeed.get(name, {}).get("enabled"):
            return name
    return "fp32"


def offload_device(deepspeed: dict[str, Any], what: str) -> str | None:
    """Device of `what` (optimizer or param) when it is offloaded, else None."""
    device = (deepspeed.get("zero_optimization", {}).get(f"offload_{what}") or {}).get("device")
    return None if device in (None, "none") else str(device)


def _fill_schedule(result: dict[str, Any], steps: int) -> None:
    """total_num_steps = run.steps; warm-up auto = a tenth of it, up to LONGEST_AUTO_WARMUP; its peak = the lr."""
    scheduler = result.get("scheduler")
    if not scheduler:
        return
    params = scheduler.setdefault("params", {})
    if scheduler.get("type") in ("WarmupDecayLR", "WarmupCosineLR"):
        params.setdefault("total_num_steps", steps)
    if params.get("warmup_num_steps") == "auto":
        params["warmup_num_steps"] = max(1, min(steps // 10, LONGEST_AUTO_WARMUP))
    if scheduler.get("type") in ("WarmupDecayLR", "WarmupLR"):
        lr = result.get("optimizer", {}).get("params", {}).get("lr")
        if lr is not None:
            params.setdefault("warmup_max_lr", lr)


def _fill_hpz(result: dict[str, Any], cluster: Cluster) -> None:
    """hpZ group = slots of a host. On one host every gather is already inside it, so hpZ is left out."""
    zero = result.get("zero_optimization", {})
    if zero.get("zero_hpz_partition_size") != "auto":
        return
    if len(cluster.hosts) == 1:
        del zero["zero_hpz_partition_size"]
    elif cluster.slots_per_host is None:
        raise UserError(
            Problem(
                "zeropp",
                "hpz on " + ", ".join(f"{h.name} ({len(h.slots)} slots)" for h in cluster.hosts),
                "hpZ keeps one copy per host, so every host needs as many slots",
                "choose equal hosts with cluster.include, or give zero_hpz_partition_size a number that divides each",
            )
        )
    else:
        zero["zero_hpz_partition_size"] = cluster.slots_per_host
