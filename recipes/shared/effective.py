"""What the engine really runs, read back from it, and how that differs from the plan.

Called by recipes on every rank after the engine stands, before the first step.
Must never repeat what the plan says: every value here is the engine's own.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups

from launcher.errors import Problem, UserError
from launcher.plan import Plan
from launcher.rundir import RunDir, write_json
from recipes.shared.leaf_modules import leaf_classes
from recipes.shared.masters import stepping

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def record_effective(engine: Any, plan: Plan, run: RunDir) -> None:
    """Writes effective.json (rank 0) and raises UserError on every rank when it differs from the plan. All ranks."""
    found = read_back(engine)
    if engine.global_rank == 0:
        write_json(run.effective, found)
    problems = differences(plan, found)
    if problems:
        raise UserError(*problems)


def read_back(engine: Any) -> dict[str, Any]:
    """The engine's own account of stage, optimizer, precision, batch, clipping, offload and hpZ groups."""
    zero = engine._config.zero_config
    inner = stepping(engine)
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in engine.module.parameters()}
    return {
        "zero_stage": engine.zero_optimization_stage(),
        "engine_optimizer": type(engine.optimizer).__name__,
        "optimizer": type(inner).__name__,
        "optimizer_groups": [
            {key: value for key, value in group.items() if key != "params"} for group in inner.param_groups
        ],
        "scheduler": type(engine.lr_scheduler).__name__ if engine.lr_scheduler else None,
        "parameter_dtypes": sorted(dtypes),
        "gradient_accumulation_dtype": str(engine.get_data_types()[1]).removeprefix("torch."),
        "gradient_clipping": engine.gradient_clipping(),
        "world_size": engine.world_size,
        "train_batch_size": engine.train_batch_size(),
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "offload_optimizer": _offloaded(engine, "optimizer"),
        "offload_param": _offloaded(engine, "param"),
        "hpz_group_size": _hpz_group_size(),
        "leaf_modules": leaf_classes(engine.module) if engine.zero_optimization_stage() == 3 else [],
        "zero_optimization": zero.model_dump(mode="json"),
    }


def differences(plan: Plan, found: dict[str, Any]) -> list[Problem]:
    """One problem for each thing the engine runs otherwise than planned."""
    ds, batch = plan.deepspeed, plan.batch
    wanted = {
        "zero_stage": plan.zero_stage,
        "optimizer": optimizer_class(plan),
        "scheduler": ds.get("scheduler", {}).get("type"),
        "parameter_dtypes": [DTYPES[plan.precision]],
        "gradient_accumulation_dtype": DTYPES[plan.accumulation],
        "gradient_clipping": ds.get("gradient_clipping", found["gradient_clipping"]),
        "world_size": plan.world_size,
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "offload_optimizer": plan.offload_device("optimizer"),
        "offload_param": plan.offload_device("param"),
        "hpz_group_size": ds.get("zero_optimization", {}).get("zero_hpz_partition_size", 1),
    }
    return [
        Problem(
            name,
            f"the engine runs {found[name]}",
            f"the plan says {value}: DeepSpeed changed or ignored it",
            "see effective.json for what else it runs; change the request to what can be honoured",
        )
        for name, value in wanted.items()
        if found[name] != value
    ]


def optimizer_class(plan: Plan) -> str:
    """Class that DeepSpeed 0.19 builds for the plan's optimizer type (engine.py, _configure_basic_optimizer)."""
    optimizer = plan.deepspeed.get("optimizer", {})
    kind, offloaded = str(optimizer.get("type")), plan.offload_device("optimizer") is not None
    if kind.lower() in ("adam", "adamw"):
        params = optimizer.get("params", {})
        decoupled = kind.lower() == "adamw" or params.get("adam_w_mode", True)
        if params.get("torch_adam"):
            return "AdamW" if decoupled else "Adam"
        return "DeepSpeedCPUAdam" if offloaded else "FusedAdam"
    if kind.lower() == "lion":
        return "DeepSpeedCPULion" if offloaded else "FusedLion"
    if kind.lower() == "adagrad":
        return "DeepSpeedCPUAdagrad" if offloaded else "Adagrad"
    return {"muon": "MuonWithAuxAdam", "lamb": "FusedLamb"}.get(kind.lower(), kind)


def _offloaded(engine: Any, what: str) -> str | None:
    """Device of `what` if the running optimizer really offloads it, else None."""
    block = getattr(engine._config.zero_config, f"offload_{what}")
    device = None if block is None else str(getattr(block.device, "value", block.device))
    if device in (None, "none"):
        return None
    stage = engine.zero_optimization_stage()
    if what == "param":
        return device if stage == 3 else None
    if stage == 3:
        return device if getattr(engine.optimizer, "offload_optimizer", False) else None
    return "cpu" if getattr(engine.optimizer, "cpu_offload", False) else None


def _hpz_group_size() -> int:
    """Ranks that share one secondary copy of the weights; 1 without hpZ."""
    group = groups._get_zero_param_intra_parallel_group()
    return 1 if group is None else dist.get_world_size(group=group)
