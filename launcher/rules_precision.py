"""Rules about element types and what happens to gradients: precision, accumulation, masters, scaling, clipping.

One function each, listed in `launcher.rules`; a file named in a docstring is DeepSpeed 0.19.8's and shows the reason.
Must never warn: what cannot be honoured is refused with its fix.
"""

from __future__ import annotations

from typing import Any

from launcher.cluster.value import Cluster
from launcher.ds_config import accumulation, named_dtype, offload_device, precision, zero_stage
from launcher.errors import Problem
from launcher.rules_optimizer import adam_on_cpu, optimizer_name
from launcher.schema import RunConfig

CLIPPING = "deepspeed.gradient_clipping"


def accumulates_whole(ds: dict[str, Any]) -> bool:
    """Whether the engine builds BF16_Optimizer: gradients in fp32, whole on every rank (runtime/engine.py)."""
    plain = zero_stage(ds) == 1 and offload_device(ds, "optimizer") is None
    return plain and precision(ds) == "bf16" and accumulation(ds) == "fp32"


def one_reduced_precision(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/config.py asserts it when training starts."""
    if not (ds.get("bf16", {}).get("enabled") and ds.get("fp16", {}).get("enabled")):
        return None
    return Problem("precision", "bf16 and fp16", "DeepSpeed takes one", "use precision=bf16 or precision=fp16")


def stage0_reduced_precision_decays_at_start(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/fp16/fused_optimizer.py `initialize_optimizer_states` steps once on zero gradients.

    Measured: the losses of stages 1 to 3 agree with each other and not with it.
    """
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


def accumulation_type_needs_a_stage(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/engine.py, _do_optimizer_sanity_check: NotImplementedError at stage 0 for two element types."""
    if zero_stage(ds) != 0 or accumulation(ds) == precision(ds):
        return None
    return Problem(
        "deepspeed.data_types.grad_accum_dtype",
        f"{accumulation(ds)} with {precision(ds)} weights at stage 0",
        "stage 0 accumulates gradients in the element type of the weights",
        "use zero=stage1, stage2 or stage3, or leave it out",
    )


def parameter_type_is_the_precision(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/engine.py asserts that data_types.param_dtype repeats what fp16 and bf16 say."""
    wanted = named_dtype(ds, "param_dtype")
    if wanted in (None, precision(ds)):
        return None
    return Problem(
        "deepspeed.data_types.param_dtype",
        f"{wanted} with precision {precision(ds)}",
        "DeepSpeed takes the element type of weights from precision and refuses another one here",
        f"use precision={wanted}, or leave it out",
    )


def reduced_masters_need_cpu_adam(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """runtime/zero/stage_1_and_2.py and stage3.py, _configure_master_weights; runtime/config.py for stage 0.

    bf16 masters with bf16_optimizer_states are exempt without offload. BF16_Optimizer ignores the key.
    """
    problems = []
    for kind in ("bf16", "fp16"):
        block = ds.get(kind, {})
        if not block.get(f"{kind}_master_weights_and_grads"):
            continue
        free = bool(block.get("bf16_optimizer_states")) and offload_device(ds, "optimizer") is None
        if zero_stage(ds) >= 1 and (free or adam_on_cpu(ds)) and precision(ds) == kind and not accumulates_whole(ds):
            continue
        problems.append(
            Problem(
                f"deepspeed.{kind}.{kind}_master_weights_and_grads",
                f"true with {optimizer_name(ds)} at stage {zero_stage(ds)}",
                f"masters in {kind} need precision={kind}, a ZeRO stage, and Adam on the CPU",
                f"use precision={kind} offload=cpu optim=adamw at stage 1, 2 or 3, or leave it out",
            )
        )
    return problems


def reduced_moments_need_reduced_masters(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/config.py asserts it when training starts."""
    block = ds.get("bf16", {})
    if not block.get("bf16_optimizer_states") or block.get("bf16_master_weights_and_grads"):
        return None
    return Problem(
        "deepspeed.bf16.bf16_optimizer_states",
        "true",
        "optimizer states in bf16 need masters in bf16",
        "add +deepspeed.bf16.bf16_master_weights_and_grads=true, or leave it out",
    )


def summed_gradients_need_a_stage_below_3(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/config.py, _do_error_check: refused at stage 3 when training starts."""
    if ds.get("gradient_allreduce_op") != "sum" or zero_stage(ds) != 3:
        return None
    return Problem(
        "deepspeed.gradient_allreduce_op", "sum at stage 3", "stage 3 averages gradients", "use zero=stage2, or mean"
    )


def scaling_before_reduction_is_honoured(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """prescale_gradients and gradient_predivide_factor, where DeepSpeed refuses or ignores them.

    runtime/zero/stage_1_and_2.py and stage3.py assert reduce_scatter=false from stage 2 on. runtime/engine.py
    (allreduce_bucket) and both optimizers divide by the world size alone when prescale_gradients is on. stage3.py,
    __avg_scatter_contiguous_grads, forgets to multiply again when the factor is the world size: gradients come out
    divided by it.
    """
    prescale, factor, stage = (
        bool(ds.get("prescale_gradients")),
        ds.get("gradient_predivide_factor", 1.0),
        zero_stage(ds),
    )
    scattered = stage >= 2 and ds.get("zero_optimization", {}).get("reduce_scatter", True)
    given = {"prescale_gradients": prescale, "gradient_predivide_factor": factor != 1.0}
    problems = [
        Problem(
            f"deepspeed.{name}",
            f"{ds[name]} at stage {stage}",
            "the reduce-scatter of stages 2 and 3 does not scale gradients before it",
            "add +deepspeed.zero_optimization.reduce_scatter=false, or leave it out",
        )
        for name, is_given in given.items()
        if is_given and scattered
    ]
    where, fix = "deepspeed.gradient_predivide_factor", "leave it out"
    if problems or factor == 1.0:
        return problems
    if prescale:
        why = "with prescale_gradients DeepSpeed divides by the number of ranks and ignores it"
        return [Problem(where, str(factor), why, fix)]
    if stage == 3 and factor == cluster.world_size:
        why = f"stage 3 divides gradients by it and, when it equals the {factor:g} ranks, never multiplies again"
        return [Problem(where, str(factor), why, fix)]
    return []


def skipped_norm_needs_no_clipping(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """runtime/zero/config.py (stage), stage_1_and_2.py (clipping, offload), engine.py (BF16_Optimizer)."""
    if ds.get("zero_optimization", {}).get("compute_grad_norm", True):
        return []
    clip, stage = ds.get("gradient_clipping", 1.0), zero_stage(ds)
    found = [
        (stage not in (1, 2), f"at stage {stage}", "it exists at stages 1 and 2", "use zero=stage1 or stage2"),
        (clip > 0, f"with gradient_clipping {clip:g}", "clipping needs the norm", f"add {CLIPPING}=0"),
        (
            stage in (1, 2) and offload_device(ds, "optimizer") is not None,
            "with an offloaded optimizer",
            "the offloaded step needs the norm",
            "use offload=none",
        ),
        (
            accumulates_whole(ds),
            "in bf16 with fp32 accumulation at stage 1",
            "the optimizer DeepSpeed builds there always computes it",
            "use zero=stage2",
        ),
    ]
    where = "deepspeed.zero_optimization.compute_grad_norm"
    return [Problem(where, f"false {got}", why, f"{fix}, or leave it out") for is_so, got, why, fix in found if is_so]


def muon_is_not_clipped(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/zero/stage_1_and_2.py and stage3.py put Muon's update where the gradient was, and clip afterwards.

    Measured at clipping 1: the norm is the update's (15 for a gradient of 1), and so the step is a fifteenth. Stage 0
    and BF16_Optimizer clip the gradient itself, and so do not agree with it.
    """
    clip = ds.get("gradient_clipping", 1.0)
    if optimizer_name(ds) != "muon" or clip <= 0 or zero_stage(ds) == 0 or accumulates_whole(ds):
        return None
    return Problem(
        CLIPPING,
        f"{clip:g} with muon at stage {zero_stage(ds)}",
        "DeepSpeed would clip Muon's finished update instead of the gradient",
        f"use {CLIPPING}=0",
    )
