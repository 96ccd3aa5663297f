"""What ranks find in a model right after it is built: buffers, placement, memory.

Called by the engine server in forked ranks, for the tests of models that people bring.
Must never build an engine: what is asked about happens before.
"""

from __future__ import annotations

import hashlib
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from launcher.plan import Plan
from recipes.shared import distributed
from recipes.shared.model import build_model


def built(case: dict[str, Any]) -> dict[str, Any]:
    """Of each rank: its buffers, which parameters are not partitioned, and digests of the gathered ones."""
    plan = Plan.from_json(case["plan"])
    ranks = distributed.initialise(plan)
    model = build_model(plan, ranks)
    mine: dict[str, Any] = {
        "buffers": {name: buffer.tolist() for name, buffer in model.named_buffers()},
        "whole": [name for name, parameter in model.named_parameters() if not hasattr(parameter, "ds_id")],
        "values": {},
    }
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            data = parameter.detach().float()
            digest = hashlib.sha256(data.numpy().tobytes()).hexdigest()
            mine["values"][name] = [digest, bool(torch.isfinite(data).all()), float(data.std(correction=0))]
    every: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(every, mine)
    return {"ranks": every}
