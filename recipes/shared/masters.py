"""One parameter of a built engine -> the fp32 copy that its optimizer steps, and what else the optimizer keeps of it.

Used by `recipes.shared.gather`, on every rank; `link` is called by `recipes.shared.engine` when the engine stands.
Must never answer for another rank: `piece` is the part of a parameter of which this rank keeps the master.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad, safe_get_local_fp32_param, safe_set_local_fp32_param
from torch import nn

OPTIMIZER = "kept_optimizer"  # on a parameter: DeepSpeed links masters to parameters, but not what steps them


def stepping(engine: Any) -> Any:
    """The optimizer that takes the steps: the one within DeepSpeed's own, where that wraps one."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def link(engine: Any) -> None:
    """Notes at every parameter which optimizer steps it, or its master. All ranks, once the engine stands."""
    inner = stepping(engine)
    for parameter in engine.module.parameters():
        setattr(parameter, OPTIMIZER, inner)


def is_built(parameter: nn.Parameter) -> bool:
    """Whether an engine trains, or at least holds, this parameter."""
    return any(hasattr(parameter, name) for name in (OPTIMIZER, "_hp_mapping", "_z3_optimizer"))


def piece(parameter: nn.Parameter) -> torch.Tensor | None:
    """View of the elements of a whole parameter whose master is another tensor, kept on this rank; None without one.

    In fp32 too from stage 1 on. At stage 0 the product trains in fp32 alone, and a parameter is its own master.
    """
    flat = parameter.data.reshape(-1)
    if hasattr(parameter, "ds_id"):
        if not (hasattr(parameter, "_z3_optimizer") and parameter.requires_grad):
            return None
        size = parameter.ds_tensor.ds_numel
        return flat[dist.get_rank(parameter.ds_process_group) * size :][:size]
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    address = mapping.lp_fragment_address
    return flat[address.start : address.start + address.numel]


def refresh(parameter: nn.Parameter, before: torch.Tensor) -> None:
    """Gives the master the elements of `piece` that differ from `before`; the others keep their full precision."""
    now = piece(parameter)
    assert now is not None
    changed = now != before
    if hasattr(parameter, "ds_id"):
        master = safe_get_local_fp32_param(parameter)
        master[: now.numel()][changed] = now[changed].to(master)
        safe_set_local_fp32_param(parameter, master)
        return
    master = parameter._hp_mapping.hp_fragment.data
    master[changed.to(master.device)] = now[changed].to(master)


def full_state(parameter: nn.Parameter, key: str) -> torch.Tensor | None:
    """The optimizer's `key` of a parameter, whole on every rank in fp32; None before its first step. All ranks."""
    if hasattr(parameter, "ds_id"):
        if not (hasattr(parameter, "_z3_optimizer") and parameter.requires_grad):
            return None
        try:
            state: torch.Tensor = parameter._z3_optimizer.get_full_hp_param(parameter, key)
        except KeyError:
            return None
        return state
    if hasattr(parameter, "_hp_mapping"):
        return _state_of_parts(parameter, key)
    inner = getattr(parameter, OPTIMIZER, None)
    value = None if inner is None else inner.state.get(parameter, {}).get(key)
    return None if value is None else value.detach().float()


def _state_of_parts(parameter: Any, key: str) -> torch.Tensor | None:
    """At stages 1 and 2. DeepSpeed's own getter knows the first parameter group alone after a load."""
    mapping, whole = parameter._hp_mapping, torch.zeros_like(parameter, dtype=torch.float32).view(-1)
    found = torch.ones(1, device=parameter.device)
    if mapping is not None:
        inner = getattr(parameter, OPTIMIZER)
        flat = inner.param_groups[mapping.param_group_index]["params"][0]
        value, held, own = inner.state.get(flat, {}).get(key), mapping.hp_fragment_address, mapping.lp_fragment_address
        if value is None:
            found.zero_()
        else:
            whole[own.start : own.start + own.numel] = value[held.start : held.start + held.numel].to(whole)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=parameter._dp_group)
    if not found.item():
        return None
    dist.all_reduce(whole, group=parameter._dp_group)
    return whole.view_as(parameter)


def full_gradient(parameter: Any) -> torch.Tensor | None:
    """The gradient averaged over ranks, whole on every rank in fp32; None where there is none now. All ranks."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if parameter.grad is None and hasattr(parameter, "_hp_mapping") and getattr(parameter, "_hp_grad", None) is None:
        there = torch.ones(1, device=parameter.device)
        if mapping is not None:
            held = mapping.offload_gradient_dict if mapping.use_offload else mapping.gradient_dict
            there.fill_(float(held.get(mapping.param_group_index) is not None))
        dist.all_reduce(there, dist.ReduceOp.MIN, group=parameter._dp_group)
        if not there.item():
            return None
    gradient = safe_get_full_grad(parameter)
    return None if gradient is None else gradient.detach().float()
