"""Rules about ZeRO: stage, offload, and which keys of zero_optimization a stage reads.

One function each, listed in `launcher.rules`; a file named in a docstring is DeepSpeed 0.19.8's and shows the reason.
Must never warn: what cannot be honoured is refused with its fix.
"""

from __future__ import annotations

from typing import Any

from launcher.cluster.value import Cluster
from launcher.ds_config import offload_device, zero_stage
from launcher.ds_schema import lookup
from launcher.errors import Problem
from launcher.rules_optimizer import adam_on_cpu
from launcher.rules_precision import accumulates_whole
from launcher.schema import RunConfig

ZERO = "deepspeed.zero_optimization"
# Keys of zero_optimization that not every stage reads (runtime/engine.py, _configure_zero_optimizer); keys that have a
# rule of their own are not here. Stage 1 with bf16 weights and fp32 accumulation is BF16_Optimizer, and reads fewer.
STAGES_1_TO_3 = ("contiguous_gradients", "overlap_comm", "reduce_bucket_size", "reduce_scatter")
STAGES_1_AND_2 = (
    "allgather_bucket_size",
    "ignore_unused_parameters",
    "parameter_alignment",
    "round_robin_gradients",
    "use_multi_rank_bucket_allreduce",
)
STAGE_3 = (
    "enable_sanity_checks",
    "log_trace_cache_warnings",
    "memory_efficient_linear",
    "override_module_apply",
    "save_muon_momentum_buffer_in_memory",
    "stage3_allgather_sequential",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
)
READERS: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = (
    (STAGES_1_TO_3, (1, 3, 2)),  # the last one is what a fix proposes
    (STAGES_1_AND_2, (1, 2)),
    (STAGE_3, (3,)),
)


def stage_is_known(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/zero/config.py: pydantic refuses another number when training starts."""
    stage = zero_stage(ds)
    if stage in (0, 1, 2, 3):
        return None
    return Problem("deepspeed.zero_optimization.stage", str(stage), "ZeRO has stages 0 to 3", "use zero=stage0..stage3")


def offload_optimizer_needs_a_stage(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/engine.py: stage 0 builds no ZeRO optimizer, and only its classes read offload_optimizer."""
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
    """runtime/engine.py, _configure_zero_optimizer: offload_param reaches the optimizer of stage 3 alone."""
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
    """runtime/zero/stage_1_and_2.py: any device but none means host memory; the swapper is stage 3's."""
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
    """runtime/swap_tensor: the folder is joined to a path, a TypeError once the model is built."""
    zero = ds.get("zero_optimization", {})
    for what in ("optimizer", "param"):
        block = zero.get(f"offload_{what}") or {}
        if block.get("device") == "nvme" and not block.get("nvme_path"):
            where = f"deepspeed.zero_optimization.offload_{what}.nvme_path"
            return Problem(where, "nothing", "offload to NVMe needs a folder", f"{where}=/path/on/a/local/disk")
    return None


def keys_belong_to_the_stage(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """runtime/engine.py, _configure_zero_optimizer: a stage's optimizer is built from its own keys, others are dropped.

    A key that holds DeepSpeed's default is let through: what it says is what runs.
    """
    stage, whole = zero_stage(ds), accumulates_whole(ds)
    problems = []
    for name, value in ds.get("zero_optimization", {}).items():
        key = lookup(f"zero_optimization.{name}")
        if key is None or value == key.default:
            continue
        readers = next((stages for keys, stages in READERS if key.name in keys), None)
        if readers is None:
            continue
        got, read = f"{value} at stage {stage}", stage in readers
        if whole and key.name != "allgather_bucket_size":
            got, read = f"{got} in bf16 with fp32 accumulation", False
        if not read:
            why = "DeepSpeed does not read it there and would ignore it"
            problems.append(Problem(f"{ZERO}.{name}", got, why, f"use zero=stage{readers[-1]}, or leave it out"))
    return problems


def allgather_bucket_is_even(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/zero/stage_1_and_2.py asserts a multiple of two elements: NCCL wants 4-byte aligned buffers."""
    size = ds.get("zero_optimization", {}).get("allgather_bucket_size", 0)
    if size % 2 == 0 or zero_stage(ds) not in (1, 2) or accumulates_whole(ds):
        return None
    return Problem(f"{ZERO}.allgather_bucket_size", str(size), "DeepSpeed wants an even number", f"use {size + 1}")


def partial_offload_needs_cpu_adam_at_stage3(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/zero/config.py (stage) and stage3.py, `backup_optimizer`: the device's share is stepped by an AdamW."""
    ratio = (ds.get("zero_optimization", {}).get("offload_optimizer") or {}).get("ratio", 1.0)
    if ratio == 1.0 or offload_device(ds, "optimizer") is None or (zero_stage(ds) == 3 and adam_on_cpu(ds)):
        return None
    return Problem(
        f"{ZERO}.offload_optimizer.ratio",
        str(ratio),
        "DeepSpeed splits the optimizer between host and device at stage 3 with CPUAdam alone",
        "use zero=stage3 with optim=adamw (without torch_adam), or leave ratio out",
    )


def super_offload_needs_cuda_at_stage3(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/engine.py reads it at stage 3 alone; runtime/superoffload asserts CUDA."""
    block = ds.get("zero_optimization", {}).get("offload_optimizer") or {}
    if not block.get("super_offload") or (
        zero_stage(ds) == 3 and cluster.accelerator == "cuda" and offload_device(ds, "optimizer") == "cpu"
    ):
        return None
    return Problem(
        f"{ZERO}.offload_optimizer.super_offload",
        f"true at stage {zero_stage(ds)} on {cluster.accelerator}",
        "SuperOffload is made for NVIDIA GPUs at stage 3 with the optimizer in host memory; "
        "DeepSpeed ignores it below stage 3",
        "use zero=stage3 offload=cpu on GPUs, or leave it out",
    )


def zenflow_changes_the_weights(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/zenflow/zenflow_stage_1_and_2.py keeps matrices transposed while the model reads them as they were.

    Measured: at stages 1 and 2 the loss of the first batch, before any step, differs from every other stage's; at
    stage 3 the embedding is indexed out of range; with the intervals at "auto" (their default) gradient accumulation
    becomes 0 and the second loss is NaN (zenflow/engine.py, configure_zenflow).
    """
    if not ds.get("zero_optimization", {}).get("zenflow"):
        return None
    return Problem(
        f"{ZERO}.zenflow",
        "a block",
        "in DeepSpeed 0.19.8 ZenFlow transposes weight matrices under the model: losses are wrong from the first batch",
        "use offload=cpu without zenflow",
    )


def elastic_checkpoint_cannot_be_loaded(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/zero/stage_1_and_2.py, _restore_step_from_elastic_checkpoint asserts; engine.py refuses another world."""
    if not ds.get("zero_optimization", {}).get("elastic_checkpoint"):
        return None
    return Problem(
        f"{ZERO}.elastic_checkpoint",
        "true",
        "DeepSpeed loads such a checkpoint on no other number of ranks, with torch's Adam not at all, "
        "and ignores the key at stage 3",
        "leave it out",
    )
