"""What published estimators say of the same configurations: DeepSpeed's own for stages 2 and 3, and accelerate's.

Used by the bench `planner`. Both count model state alone.
Must never correct them.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

from benches.report import Row
from launcher.plan import Plan

ADAM_COPIES = 4  # accelerate's factor for training with Adam: weights, gradients, two moments


def others(measured: list[tuple[Plan, int]]) -> list[Row]:
    """Absolute relative error of each estimator on the configurations it is for; no bound is theirs to keep."""
    rows = []
    for stage, estimate in ((2, _deepspeed2), (3, _deepspeed3)):
        errors = [abs(estimate(plan) / peak - 1) for plan, peak in measured if plan.zero_stage == stage]
        if errors:
            rows.append(Row(f"error of DeepSpeed's estimator of stage {stage}, absolute", "ratio", errors))
    errors = [abs(_accelerate(plan) / peak - 1) for plan, peak in measured]
    return [*rows, Row("error of accelerate's estimate, absolute", "ratio", errors)]


def _deepspeed2(plan: Plan) -> float:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    with contextlib.redirect_stdout(io.StringIO()):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params=_parameters(plan),
            num_gpus_per_node=plan.world_size,
            num_nodes=1,
            cpu_offload=plan.offload_device("optimizer") is not None,
        )
    return _of_a_rank(plan, host, device)


def _deepspeed3(plan: Plan) -> float:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    with contextlib.redirect_stdout(io.StringIO()):
        host, device, _ = estimate_zero3_model_states_mem_needs(
            total_params=_parameters(plan),
            largest_layer_params=_largest(plan),
            num_gpus_per_node=plan.world_size,
            num_nodes=1,
            cpu_offload=plan.offload_device("optimizer") is not None,
            cpu_offload_params=plan.offload_device("param") is not None,
            zero_init=True,
        )
    return _of_a_rank(plan, host, device)


def _of_a_rank(plan: Plan, host: float, device: float) -> float:
    """A rank's share of its host, beside its device where that is the same memory."""
    return device + (host / plan.world_size if plan.cluster.accelerator == "cpu" and _offloads(plan) else 0)


def _offloads(plan: Plan) -> bool:
    return plan.offload_device("optimizer") is not None


def _accelerate(plan: Plan) -> float:
    from accelerate.utils import calculate_maximum_sizes  # type: ignore[import-untyped]

    total, _ = calculate_maximum_sizes(_model(plan))
    return float(ADAM_COPIES * total)


def _parameters(plan: Plan) -> int:
    assert plan.estimate.parameters is not None
    return plan.estimate.parameters


def _largest(plan: Plan) -> int:
    return max(sum(p.numel() for p in module.parameters(recurse=False)) for module in _model(plan).modules())


_MODELS: dict[str, Any] = {}


def _model(plan: Plan) -> Any:
    """The model on the meta device, in the plan's precision."""
    from recipes.shared.hf_config import DTYPES
    from recipes.shared.profile import build

    key = f"{plan.config.model.config} {plan.precision}"
    if key not in _MODELS:
        _MODELS[key] = build(plan.config).to(DTYPES[plan.precision])
    return _MODELS[key]
