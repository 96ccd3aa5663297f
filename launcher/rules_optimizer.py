"""Rules about the optimizer and its learning-rate schedule.

One function each, listed in `launcher.rules`; a file named in a docstring is DeepSpeed 0.19.8's and shows the reason.
Must never warn: what cannot be honoured is refused with its fix.
"""

from __future__ import annotations

from typing import Any

from launcher.cluster.value import Cluster
from launcher.ds_config import offload_device, zero_stage
from launcher.errors import Problem
from launcher.schema import RunConfig

# Their state is a step and tensors of the parameters' shapes: they fit any layout.
LAID_OUT_ANEW = ("adam", "adamw", "lion", "sgd", "adagrad")
TESTED = ("adam", "adamw", "adagrad", "lion", "muon")  # runtime/zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS, by type here
# Types whose step looks at each parameter's own shape or norm.
SHAPED = ("adafactor", "lamb")
UNUSABLE = {
    "sparseadam": "it takes sparse gradients only, and these models have dense ones",
    "muadam": "mup's optimizers need a model with mup's base shapes",
    "muadamw": "mup's optimizers need a model with mup's base shapes",
    "musgd": "mup's optimizers need a model with mup's base shapes",
}


def optimizer_name(ds: dict[str, Any]) -> str:
    """The optimizer's type in lower case, empty without one."""
    return str(ds.get("optimizer", {}).get("type", "")).lower()


def adam_on_cpu(ds: dict[str, Any]) -> bool:
    """Whether the engine builds DeepSpeedCPUAdam (runtime/engine.py, get_optimizer_configuration)."""
    torch_adam = ds.get("optimizer", {}).get("params", {}).get("torch_adam")
    return optimizer_name(ds) in ("adam", "adamw") and not torch_adam and offload_device(ds, "optimizer") is not None


def optimizer_can_train_these_models(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """torch/optim/sparse_adam.py and runtime/engine.py (mup is imported there); both fail once the model is built."""
    name = optimizer_name(ds)
    if name not in UNUSABLE:
        return None
    return Problem("deepspeed.optimizer.type", ds["optimizer"]["type"], UNUSABLE[name], "use optim=adamw")


def untested_optimizer_is_opted_into(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/zero/utils.py knows the tested ones by exact type; engine.py asserts the flag for any other."""
    name = optimizer_name(ds)
    if not name or name in TESTED or name in UNUSABLE or zero_stage(ds) == 0 or ds.get("zero_allow_untested_optimizer"):
        return None
    return Problem(
        "deepspeed.optimizer.type",
        f"{ds['optimizer']['type']} at stage {zero_stage(ds)}",
        "DeepSpeed has not tested it under ZeRO and refuses it unless told otherwise",
        "add +deepspeed.zero_allow_untested_optimizer=true if you want it nevertheless, or use optim=adamw",
    )


def shaped_optimizer_needs_stage0(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/zero/stage_1_and_2.py and stage3.py hand the optimizer one flat piece of many parameters.

    Measured with Adafactor: stages 0, 1 and 3 give three different curves, where every other type gives one.
    """
    name = optimizer_name(ds)
    if name not in SHAPED or zero_stage(ds) == 0:
        return None
    return Problem(
        "deepspeed.optimizer.type",
        f"{ds['optimizer']['type']} at stage {zero_stage(ds)}",
        "it scales each parameter by its own shape or norm, and ZeRO hands it flat pieces of many",
        "use zero=stage0, or optim=adamw",
    )


def lion_on_cpu_needs_offload(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """ops/op_builder/cpu has no FusedLion; with offload the engine builds DeepSpeedCPULion."""
    if optimizer_name(ds) != "lion" or cluster.accelerator != "cpu" or offload_device(ds, "optimizer") is not None:
        return None
    return Problem("optim", "lion on cpu", "FusedLion has no CPU kernel", "use offload=cpu, or optim=adamw")


def lamb_needs_cuda(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """ops/op_builder/cpu has no FusedLamb."""
    if optimizer_name(ds) != "lamb" or cluster.accelerator == "cuda":
        return None
    return Problem(
        "deepspeed.optimizer.type", f"Lamb on {cluster.accelerator}", "FusedLamb has no CPU kernel", "use optim=adamw"
    )


def muon_at_stage3_needs_plain_reduction(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/zero/stage3.py raises ValueError when the engine is built."""
    if optimizer_name(ds) != "muon" or zero_stage(ds) != 3:
        return None
    if ds.get("zero_optimization", {}).get("reduce_scatter") is False:
        return None
    return Problem(
        "optim",
        "muon at stage 3",
        "Muon needs whole gradients, which the reduce-scatter of stage 3 does not give",
        "add +deepspeed.zero_optimization.reduce_scatter=false, or use zero=stage2",
    )


def adagrad_at_stage3_needs_offload(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/zero/stage3.py, load_state_dict: torch's Adagrad has state from the start, for groups cut otherwise.

    DeepSpeedCPUAdagrad, which offload brings, resumes exactly.
    """
    if optimizer_name(ds) != "adagrad" or zero_stage(ds) != 3 or offload_device(ds, "optimizer") is not None:
        return None
    return Problem(
        "optim",
        "adagrad at stage 3",
        "DeepSpeed cannot load its optimizer state again, so the run could not be resumed",
        "use offload=cpu, zero=stage2, or optim=adamw",
    )


def warmup_fits_the_run(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/lr_schedules.py: a warm-up longer than the run never reaches the learning rate that was asked for."""
    params = ds.get("scheduler", {}).get("params", {})
    warmup, total = params.get("warmup_num_steps"), params.get("total_num_steps")
    if warmup in (None, "auto") or total in (None, "auto") or warmup <= total:
        return None
    return Problem(
        "deepspeed.scheduler.params.warmup_num_steps",
        str(warmup),
        f"the run has {total} steps",
        f"use {max(total // 10, 1)} or fewer, a longer run.steps, or schedule=constant",
    )


def peak_learning_rate_is_said_once(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/lr_schedules.py: warm-up schedules set each group's lr to warmup_max_lr; the optimizer's is forgotten."""
    peak = ds.get("scheduler", {}).get("params", {}).get("warmup_max_lr")
    lr = ds.get("optimizer", {}).get("params", {}).get("lr")
    if peak in (None, "auto") or lr is None or (peak if isinstance(peak, list) else [peak]) == [lr]:
        return None
    return Problem(
        "deepspeed.scheduler.params.warmup_max_lr",
        str(peak),
        f"the optimizer's lr is {lr:g}, and DeepSpeed would forget it",
        f"use deepspeed.optimizer.params.lr={peak}, and leave warmup_max_lr out",
    )


def muon_rates_need_a_relative_schedule(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/lr_schedules.py: only WarmupCosineLR multiplies each group's own lr; the others write one for all."""
    params, kind = ds.get("optimizer", {}).get("params", {}), ds.get("scheduler", {}).get("type")
    given = [name for name in ("muon_lr", "adam_lr") if params.get(name) not in (None, params.get("lr"))]
    if not given or kind not in ("WarmupLR", "WarmupDecayLR", "OneCycle", "LRRangeTest"):
        return None
    return Problem(
        "schedule",
        f"{kind} with {' and '.join(given)}",
        "it writes one learning rate into every group, so they would be ignored",
        "use schedule=warmup_cosine or schedule=constant",
    )
