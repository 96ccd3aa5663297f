"""Generation and evaluation in ranks, with the forwards of each counted.

Called in ranks that the engine server forks.
Must never decide what is right: the tests compare.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from launcher.plan import Plan
from recipes.shared import distributed
from recipes.shared.engine import build_engine
from recipes.shared.generate import Until, generate
from recipes.shared.model import build_model


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Answers to case["prompts"] for each of case["ends"], and how often each rank ran the model."""
    plan = Plan.from_json(case["plan"])
    ranks = distributed.initialise(plan)
    engine = build_engine(plan, build_model(plan, ranks))
    forwards = []
    engine.module.register_forward_pre_hook(lambda *arguments: forwards.append(1))
    untils = [Until(frozenset(ends), case["new"], case["positions"]) for ends in case["ends"]]
    found = [generate(engine, ranks, case["prompts"], until, case["rows"]) for until in untils]
    every: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(every, len(forwards))
    return {"answers": found, "forwards": every, "training": engine.module.training}
