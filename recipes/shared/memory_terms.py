"""A built engine -> bytes that this rank holds between steps, by the names the planner gives them.

Read off the engine's own tensors when training is over, for the launcher to set beside what was planned.
Must never take a figure from the plan, nor talk to another rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from recipes.shared.checkpoint.average import KEY
from recipes.shared.masters import stepping

# Tensors of DeepSpeed's optimizers, or lists or dicts of them (runtime/zero/stage_1_and_2.py and stage3.py).
ATTRIBUTES = (
    ("master", "single_partition_of_fp32_groups"),
    ("master", "fp32_partitioned_groups_flat"),
    ("gradients", "grad_partitions_flat_buffer"),
    ("gradients", "averaged_gradients"),
    ("accumulated gradients", "accumulated_grads_in_cpu"),
    ("weights on their way", "param_buffer_of_bit16_for_cpu_offload_groups"),
    ("weights on their way", "temp_grad_buffer_for_cpu_offload"),
    ("gradients on their way", "temp_grad_buffer_for_gpu_offload"),
)


def measured(engine: Any, device: torch.device) -> dict[str, Any]:
    """{"terms": bytes by term} of this rank; on a GPU also the most that was allocated, and reserved, at any moment."""
    found: dict[str, Any] = {"terms": held(engine)}
    if device.type == "cuda":
        found["allocated_bytes"] = int(torch.cuda.max_memory_allocated(device))
        found["reserved_bytes"] = int(torch.cuda.max_memory_reserved(device))
    return found


def held(engine: Any) -> dict[str, int]:
    """Bytes by term, on the device and the host together. Each storage counts once, for the first term that has it."""
    seen: set[int] = set()
    sizes: dict[str, int] = {}
    for term, tensor in _named(engine):
        storage = tensor.untyped_storage()
        if tensor.numel() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes[term] = sizes.get(term, 0) + storage.nbytes()
    return sizes


def _named(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that is kept, with its term: shards before the whole parameters that may be made of them."""
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    for parameter in parameters:
        yield "weights", getattr(parameter, "ds_tensor", parameter.data)
        yield from (("secondary weights", each) for each in _tensors(getattr(parameter, "ds_secondary_tensor", None)))
    yield from (("weights", buffer) for buffer in engine.module.buffers())
    yield from (("gathered parameters", parameter.data) for parameter in parameters)
    yield from (("gradients", parameter.grad) for parameter in parameters if parameter.grad is not None)
    sharded = hasattr(optimizer, "fp32_partitioned_groups_flat")
    for term, attribute in ATTRIBUTES:
        for tensor in _tensors(getattr(optimizer, attribute, None)):
            yield term, tensor
            if term == "master" and tensor.grad is not None:
                yield "fp32 gradients" if sharded else "offloaded gradients", tensor.grad
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield from (("reduce buckets", tensor) for tensor in _tensors(bucket.buffer))
    for state in stepping(engine).state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:  # the number of steps is a tensor too
                yield "average" if name == KEY else "moments", value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
