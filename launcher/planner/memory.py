"""Model-state bytes per rank: the textbook figure, and what DeepSpeed 0.19 keeps resident.

Called when a plan is built. Pure arithmetic over the parameter count, the stage, the precision and the offload.
Must never claim to be a peak: activations, logits and fragmentation are not in it, and the plan says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MOMENT_BYTES = 8  # two fp32 Adam moments
AVERAGE_BYTES = 4  # of an exponential moving average, as the masters
DEFAULT_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's reduce_bucket_size where none is given


@dataclass(frozen=True)
class ModelState:
    """Bytes per rank. `device` and `host` list named terms of what is resident between steps."""

    textbook_bytes: int
    device: dict[str, int]
    host: dict[str, int]


def textbook_bytes(parameters: int, stage: int, world_size: int, precision: str) -> int:
    """Mixed-precision Adam (2 + 2 + 12 bytes) or fp32 Adam (4 + 4 + 8), split by stage over `world_size` ranks.

    Source: Rajbhandari et al., ZeRO, section 3: stage 1 splits the optimizer, 2 gradients too, 3 weights too.
    """
    weight = gradient = WEIGHT_BYTES[precision]
    optimizer = 16 - weight - gradient
    whole = (weight if stage < 3 else 0) + (gradient if stage < 2 else 0) + (optimizer if stage < 1 else 0)
    split = 16 - whole
    return round(parameters * (whole + split / world_size))


def model_state(
    parameters: int,
    stage: int,
    world_size: int,
    precision: str,
    offload_optimizer: bool,
    offload_param: bool,
    frozen: int = 0,
    averaged: bool = False,
    state_bytes: int = MOMENT_BYTES,
) -> ModelState:
    """Resident terms after a step, as DeepSpeed 0.19.8 allocates them (padding left out).

    `parameters` are trained, `frozen` ones beside them are weights and nothing else. `averaged`: with ema.decay.
    `state_bytes`: what the optimizer keeps of a parameter beside its master; Adam's two moments by default.
    Stages 1 to 3 keep a separate fp32 master even in fp32; stage 3 keeps its gradient partition for good.
    """
    weight = WEIGHT_BYTES[precision]
    share, every = -(-parameters // world_size), parameters + frozen
    textbook = textbook_bytes(parameters, stage, world_size, precision)
    textbook += round(weight * frozen / (world_size if stage == 3 else 1))
    if stage == 0:
        master = 0 if precision == "fp32" else 4 * parameters
        device = {"weights": weight * every, "master": master, "moments": state_bytes * parameters}
        device["average"] = AVERAGE_BYTES * parameters * averaged
        return ModelState(textbook, _present(device), {})
    device = {"weights": weight * (-(-every // world_size) if stage == 3 else every)}
    host: dict[str, int] = {}
    if offload_param:
        host["weights"] = device.pop("weights")
    optimizer_home = host if offload_optimizer else device
    optimizer_home["master"] = 4 * share
    optimizer_home["moments"] = state_bytes * share
    optimizer_home["average"] = AVERAGE_BYTES * share * averaged
    if stage == 3 or offload_optimizer:
        optimizer_home["gradients"] = (4 if offload_optimizer else weight) * share
    return ModelState(textbook, _present(device), _present(host))


def reduce_bucket_bytes(deepspeed: dict[str, Any], stage: int, precision: str) -> int:
    """Bytes of a rank's gradient reduction buffers, which DeepSpeed allocates whole however small the model is.

    reduce_bucket_size elements; twice that at stages 1 and 2 with overlap_comm, from the first backward to the step;
    once at stage 3, for good. Source: runtime/zero, setup_buckets (stages 1, 2) and _setup_for_real_optimizer (3).
    """
    zero = deepspeed.get("zero_optimization", {})
    if stage == 0 or not zero.get("contiguous_gradients", True):
        return 0
    elements = zero.get("reduce_bucket_size", DEFAULT_BUCKET_ELEMENTS)
    kind = str(deepspeed.get("communication_data_type") or precision).lower()
    buffers = 2 if stage < 3 and zero.get("overlap_comm") else 1
    return int(elements) * WEIGHT_BYTES[kind] * buffers


def _present(terms: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in terms.items() if size}
