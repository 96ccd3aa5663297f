"""Stage 2 and modules of the user's own: ranks have to come to their gradients in one order, step after step.

Called by `engine` once it stands. DeepSpeed 0.19.8 adds up what lies at one place of each rank's bucket, and a bucket
is filled in the order in which gradients come: ranks that use other modules train on sums of different parameters.
Must never let a step be taken on such sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from launcher.errors import Problem, UserError
from launcher.plan import Plan

MODULUS = 2**61 - 1


def watch_order(plan: Plan, engine: Any) -> None:
    """Has every optimizer step compare, over all ranks, the order of the gradients since the last: 8 bytes a rank.

    The step raises UserError on every rank where it differs. Nothing for other stages and for models of a library.
    """
    if plan.zero_stage != 2 or plan.world_size == 1 or plan.config.model.target is None:
        return
    optimizer, digest = engine.optimizer, [0]
    numbers = {id(parameter): number for number, parameter in enumerate(engine.module.parameters(), 1)}
    reduce, step = optimizer.reduce_independent_p_g_buckets_and_remove_grads, optimizer.step

    def noted(parameter: torch.nn.Parameter, group: int) -> Any:
        digest[0] = (digest[0] * 1_000_003 + numbers[id(parameter)]) % MODULUS
        return reduce(parameter, group)

    def compared(*arguments: Any, **options: Any) -> Any:
        mine = torch.tensor(digest, device=engine.device)
        every = [torch.empty_like(mine) for _ in range(plan.world_size)]
        dist.all_gather(every, mine)
        digest[0] = 0
        if len({int(other) for other in every}) > 1:
            why = "ranks used different modules: stage 2 has added up gradients of different parameters"
            fix = "name the class that chooses among them in model.leaf_modules, and use zero=stage1 or zero=stage3"
            raise UserError(Problem("zero", "stage2", why, fix))
        return step(*arguments, **options)

    optimizer.reduce_independent_p_g_buckets_and_remove_grads = noted
    optimizer.step = compared
