"""Parameters without dimensions, which DeepSpeed 0.19.8 can neither send to other ranks nor clip at stage 0.

Used by `engine` while it builds an engine, and once afterwards.
Must never change anything for a model that has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn


def scalars_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters without dimensions; at stage 3 they have become vectors already."""
    return [parameter for parameter in model.parameters() if parameter.dim() == 0]


@contextlib.contextmanager
def sent_as_vectors(model: nn.Module) -> Iterator[None]:
    """Rank 0's parameters are sent as bytes, and a scalar has no view as bytes: it has one element meanwhile."""
    scalars, broadcast = scalars_of(model), DeepSpeedEngine._broadcast_model

    def with_vectors(engine: Any) -> None:
        for parameter in scalars:
            parameter.data = parameter.data.reshape(1)
        broadcast(engine)
        for parameter in scalars:
            parameter.data = parameter.data.reshape(())

    DeepSpeedEngine._broadcast_model = with_vectors
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = broadcast


def clip_scalars_too(engine: Any) -> None:
    """Stage 0 in fp32 multiplies gradients in place by a vector, which a scalar cannot become: torch's own clips."""
    if scalars_of(engine.module) and engine.zero_optimization_stage() == 0:
        engine.clip_fp32_gradients = lambda: torch.nn.utils.clip_grad_norm_(
            engine.module.parameters(), engine.gradient_clipping()
        )
