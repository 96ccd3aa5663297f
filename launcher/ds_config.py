"""RunConfig + Cluster + Batch -> the DeepSpeed dict that the engine gets.

Called when a plan is built. Fills only what depends on the cluster or the run's length; the rest is the groups' own.
Must never restate a DeepSpeed default: what the user did not choose is absent.
"""

from __future__ import annotations

import copy
from typing import Any

from launcher.batch import Batch
from launcher.cluster.value import Cluster
from launcher.ds_schema import ROOT
from launcher.ds_values import AUTO, show
from launcher.errors import Problem, UserError, raise_if
from launcher.schema import RunConfig

LONGEST_AUTO_WARMUP = 2000  # optimizer steps; what published runs of any length use at most
BATCH_KEYS = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
}
WIDTHS = ("hidden_size", "n_embd", "d_model")  # the model's width, as its family calls it
SIZES = {
    "reduce_bucket_size": "hidden size ** 2",
    "stage3_prefetch_bucket_size": "0.9 x hidden size ** 2",
    "stage3_param_persistence_threshold": "10 x hidden size",
}
# Names DeepSpeed takes for an element type (runtime/utils.py, DtypeEnum).
DTYPES = {
    "fp16": ("torch.float16", "fp16", "float16", "half"),
    "bf16": ("torch.bfloat16", "bf16", "bfloat16"),
    "fp32": ("torch.float32", "fp32", "float32", "float"),
}
# Where "auto" is solved, and how.
SOLVED = {
    "scheduler.params.total_num_steps": "run.steps",
    "scheduler.params.warmup_num_steps": f"run.steps / 10, at least 1 and at most {LONGEST_AUTO_WARMUP}",
    "scheduler.params.warmup_min_lr": "0",
    "scheduler.params.warmup_max_lr": "optimizer.params.lr",
    "zero_optimization.zero_hpz_partition_size": "slots of a host; left out on one host",
} | {f"zero_optimization.{name}": formula for name, formula in SIZES.items()}


def build(config: RunConfig, cluster: Cluster, batch: Batch) -> dict[str, Any]:
    """The complete DeepSpeed dict; `config` is not changed."""
    result = copy.deepcopy(config.deepspeed)
    result["train_batch_size"] = batch.global_batch_size
    result["train_micro_batch_size_per_gpu"] = batch.micro_batch_size
    result["gradient_accumulation_steps"] = batch.gradient_accumulation_steps
    _fill_schedule(result, config.run.steps)
    _fill_hpz(result, cluster)
    _fill_sizes(result.get("zero_optimization", {}), config.model.config)
    return result


def refuse_batch_keys(deepspeed: dict[str, Any]) -> None:
    """Raises UserError for batch sizes among the DeepSpeed keys."""
    raise_if(
        [
            Problem(f"{ROOT}.{key}", show(deepspeed[key]), "the batch has one owner", f"use {option}")
            for key, option in BATCH_KEYS.items()
            if key in deepspeed
        ]
    )


def missing_optimizer(deepspeed: dict[str, Any]) -> list[Problem]:
    """A problem for a dict without an optimizer: DeepSpeed builds an engine that cannot step."""
    if deepspeed.get("optimizer"):
        return []
    why = "DeepSpeed builds no optimizer, and training fails at its first step"
    return [Problem("optim", "nothing", why, "use optim=adamw, or give deepspeed.file an optimizer")]


def zero_stage(deepspeed: dict[str, Any]) -> int:
    """The ZeRO stage that `deepspeed` asks for; DeepSpeed reads an absent block as stage 0."""
    return int(deepspeed.get("zero_optimization", {}).get("stage", 0))


def precision(deepspeed: dict[str, Any]) -> str:
    """bf16, fp16 or fp32: the element type of weights and gradients that `deepspeed` asks for."""
    for name in ("bf16", "fp16"):
        if deepspeed.get(name, {}).get("enabled"):
            return name
    return "fp32"


def accumulation(deepspeed: dict[str, Any]) -> str:
    """bf16, fp16 or fp32: the element type gradients are accumulated in."""
    return named_dtype(deepspeed, "grad_accum_dtype") or precision(deepspeed)


def named_dtype(deepspeed: dict[str, Any], key: str) -> str | None:
    """bf16, fp16 or fp32: the element type that `key` of data_types names; None without one."""
    given = deepspeed.get("data_types", {}).get(key)
    return next((name for name, spellings in DTYPES.items() if given in spellings), None)


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
    lr = result.get("optimizer", {}).get("params", {}).get("lr")
    answers = {
        "total_num_steps": steps,
        "warmup_num_steps": max(1, min(steps // 10, LONGEST_AUTO_WARMUP)),
        "warmup_min_lr": 0.0,
        "warmup_max_lr": lr,
    }
    params |= {name: value for name, value in answers.items() if params.get(name) == AUTO and value is not None}
    if scheduler.get("type") in ("WarmupDecayLR", "WarmupCosineLR"):
        params.setdefault("total_num_steps", steps)
    if scheduler.get("type") in ("WarmupDecayLR", "WarmupLR") and lr is not None:
        params.setdefault("warmup_max_lr", lr)


def _fill_hpz(result: dict[str, Any], cluster: Cluster) -> None:
    """hpZ group = slots of a host. On one host every gather is already inside it, so hpZ is left out."""
    zero = result.get("zero_optimization", {})
    if zero.get("zero_hpz_partition_size") != AUTO:
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


def _fill_sizes(zero: dict[str, Any], model: dict[str, Any]) -> None:
    """Element counts by the model's width, as transformers' integrations/deepspeed.py sets them.

    Raises UserError for a model whose configuration names no width.
    """
    wanted = [name for name in SIZES if zero.get(name) == AUTO]
    text = model.get("text_config")
    fields = model | text if isinstance(text, dict) else model
    hidden = next((fields[name] for name in WIDTHS if isinstance(fields.get(name), int)), None)
    if hidden is None:
        why = f"the model's configuration has none of {', '.join(WIDTHS)} for"
        where = f"{ROOT}.zero_optimization"
        raise_if([Problem(f"{where}.{at}", show(AUTO), f"{why} {SIZES[at]}", "write a number") for at in wanted])
        return
    answers = (hidden**2, 9 * hidden**2 // 10, 10 * hidden)
    zero |= {name: answer for name, answer in zip(SIZES, answers, strict=True) if name in wanted}
