"""Brings DeepSpeed's compiled CPU Adam to the state it had when a checkpoint was saved.

Called by `load` after the engine has loaded. The C++ optimizer keeps beta**step as a product that it multiplies once a
step (ops/csrc/includes/cpu_adam.h, IncrementStep); a new process computes it with pow() instead, which rounds
differently, and the resumed losses leave the uninterrupted ones in the last bits.
Must never touch parameters or moments: it replays the steps on scratch tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes.shared.masters import stepping


def replay_bias_correction(engine: Any) -> None:
    """Replays the optimizer's past steps on one scratch element. Each rank for itself; nothing to do for other kernels.

    About 5 microseconds a step. Groups with different betas need no replay: the kernel uses pow() at every change.
    """
    optimizer = stepping(engine)
    update = _kernel(optimizer)
    steps = max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
    groups = optimizer.param_groups
    if update is None or not steps or len({tuple(group["betas"]) for group in groups}) != 1:
        return
    for step in range(1, steps + 1):
        update(step, groups[0])


def _kernel(optimizer: Any) -> Any:
    """A function (step, group) that runs the optimizer's compiled CPU kernel on scratch, or None when it has none."""
    scratch = [torch.zeros(1) for _ in range(4)]
    if hasattr(optimizer, "ds_opt_adam"):

        def cpu_adam(step: int, group: dict[str, Any]) -> None:
            beta1, beta2 = group["betas"]
            hyper = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"], group["bias_correction"])
            optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *hyper, *scratch)

        return cpu_adam
    if hasattr(optimizer, "multi_tensor_adam") and not torch.cuda.is_available():
        overflow, lists = torch.zeros(1, dtype=torch.int32), [[tensor] for tensor in scratch]

        def fused_adam(step: int, group: dict[str, Any]) -> None:
            beta1, beta2 = group["betas"]
            hyper = (group["lr"], beta1, beta2, group["eps"], step, optimizer.adam_w_mode, group["bias_correction"])
            optimizer.multi_tensor_adam(2048 * 32, overflow, lists, *hyper, group["weight_decay"])

        return fused_adam
    return None
