"""Model + plan -> DeepSpeed engine, and a record of what it really runs.

Called by recipes on every rank, once per process (a stage-3 engine is never freed).
Must never change the plan's dict: DeepSpeed gets a copy.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from launcher.plan import Plan
from launcher.rundir import RunDir, write_json
from recipes.shared.operators import remember_cpu


def build_engine(plan: Plan, model: nn.Module) -> Any:
    """The engine over `model` with the optimizer and schedule of the plan's DeepSpeed dict. All ranks."""
    if "TORCH_EXTENSIONS_DIR" in plan.env:
        remember_cpu(Path(plan.env["TORCH_EXTENSIONS_DIR"]))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=copy.deepcopy(plan.deepspeed), dist_init_required=False
    )
    return engine


def record_effective(engine: Any, plan: Plan, run: RunDir) -> None:
    """Writes what the engine really runs to effective.json, read back from the engine. Rank 0 writes."""
    if engine.global_rank != 0:
        return
    zero = engine._config.zero_config
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    first = next(engine.module.parameters())
    write_json(
        run.effective,
        {
            "zero_stage": engine.zero_optimization_stage(),
            "engine_optimizer": type(engine.optimizer).__name__,
            "optimizer": type(inner).__name__,
            "optimizer_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in inner.param_groups
            ],
            "scheduler": type(engine.lr_scheduler).__name__ if engine.lr_scheduler else None,
            "parameter_dtype": str(first.dtype).removeprefix("torch."),
            "gradient_clipping": engine.gradient_clipping(),
            "train_batch_size": engine.train_batch_size(),
            "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "offload_optimizer": _device(zero.offload_optimizer),
            "offload_param": _device(zero.offload_param),
            "zero_optimization": zero.model_dump(mode="json"),
        },
    )


def global_grad_norm(engine: Any) -> float | None:
    """Norm of the averaged gradient over all parameters, before clipping, of the step just taken."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def plain_grad_norm(engine: Any) -> torch.Tensor | None:
    """The same norm at stage 0 in fp32, where the engine keeps none: call between the last backward and step."""
    if hasattr(engine.optimizer, "_global_grad_norm"):
        return None
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def _device(block: Any) -> str | None:
    return None if block is None else str(getattr(block.device, "value", block.device))
