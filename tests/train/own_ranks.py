"""What ranks find in a model right after it is built, and after one step: buffers, placement, memory, groups, norms.

Called by the engine server in forked ranks, for the tests of models that people bring.
Must never run the loop: what is asked about happens before, or in its first step.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from launcher.plan import Plan
from recipes.shared import distributed
from recipes.shared.engine import build_engine, global_grad_norm, plain_grad_norm
from recipes.shared.groups import group_names
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


def grown(case: dict[str, Any]) -> dict[str, Any]:
    """Anonymous memory by which each rank grew while it built the model, and which parameters are not partitioned."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
    from benches.memory import PeakMemory

    plan = Plan.from_json(case["plan"])
    ranks = distributed.initialise(plan)
    with PeakMemory() as memory:
        model = build_model(plan, ranks)
    whole = [name for name, parameter in model.named_parameters() if not hasattr(parameter, "ds_id")]
    every: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(every, {"grown_bytes": memory.grown_bytes, "whole": whole})
    return {"ranks": every}


def stepped(case: dict[str, Any]) -> dict[str, Any]:
    """Of each rank after one step: names of each optimizer group, and the gradient norm."""
    plan = Plan.from_json(case["plan"])
    ranks = distributed.initialise(plan)
    engine = build_engine(plan, build_model(plan, ranks))
    tokens = torch.arange(32).view(2, 16) + ranks.rank
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    norm = plain_grad_norm(engine)
    engine.step()
    mine = {
        "groups": group_names(plan, engine.module),
        "norm": global_grad_norm(engine) if norm is None else float(norm),
    }
    every: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(every, mine)
    return {"ranks": every}
