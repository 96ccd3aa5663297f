"""Takes DeepSpeed's fetching off the modules of a model of which stage 3 partitions nothing.

Used by the train loop, once the audit has seen the first steps. No parameter of such a model is longer than
stage3_param_persistence_threshold, and each stays whole between steps. DeepSpeed 0.19.8 still runs hooks and autograd
functions around every module, forward and backward, which find each time that all is there: a tenth of a step on a CPU.
Must never change a bit of what is computed, or leave a module without its parameters, whoever partitioned them since.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.utils import apply_to_tensors_only
from deepspeed.utils.z3_leaf_module import set_z3_leaf_module
from torch import nn


def nothing_is_partitioned(engine: Any) -> bool:
    """Whether stage 3 keeps every parameter of the model whole, on the device and in the layout it is used in."""
    if engine.zero_optimization_stage() != 3:
        return False
    offload = engine.optimizer.parameter_offload
    if offload.zenflow or offload.offload_device is not None:  # ZenFlow's hooks transpose weights for each use
        return False
    return all(parameter.ds_persist for parameter in engine.module.parameters())


def fetch_at_once(engine: Any) -> None:
    """Has the model fetched as a whole where its forward and its backward begin, and no module inside it. All ranks.

    Between two steps, for a model of which `nothing_is_partitioned`. The model as a whole keeps DeepSpeed's hooks: what
    a GatheredParameters partitioned since, even between forward and backward, is fetched again. A module inside that
    is called by itself fetches what it lacks. The graph keeps a node where each of DeepSpeed's autograd functions was:
    autograd adds the gradients of one tensor up in the order of its nodes.
    """
    model, offload = engine.module, engine.optimizer.parameter_offload
    coordinator = offload.get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()  # it is recorded anew, as where DeepSpeed registers hooks again
    inside = [module for module in model.modules() if module is not model]
    tables = {id(table) for module in inside for table in (module._forward_pre_hooks, module._forward_hooks)}
    for handles in (offload.forward_hooks, offload.backward_hooks):
        for handle in [handle for handle in handles if id(handle.hooks_dict_ref()) in tables]:
            handle.remove()
            handles.remove(handle)
    set_z3_leaf_module(model, True)  # its own hooks now fetch what is inside it, too
    for parameter in model.parameters():
        parameter.is_external_param = True  # which no hook lets go of, not even while the trace is recorded
    for module in inside:
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave)


def _enter(module: nn.Module, inputs: Any) -> Any:
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    missing = [parameter for parameter in own if parameter.ds_status != ZeroParamStatus.AVAILABLE]
    if missing:
        missing[0].all_gather(missing)
    return apply_to_tensors_only(_passed_on, inputs)


def _leave(module: nn.Module, inputs: Any, output: Any) -> Any:
    return apply_to_tensors_only(_passed_on, output)


def _passed_on(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor behind a node of the graph, where there is one."""
    return tensor.view_as(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor
