"""Process group, device and this rank's place; agreement on the plan before anything else.

Called first by every recipe on every rank.
Must never build a model or read data: distributed comes before both.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from launcher.errors import Problem, UserError
from launcher.plan import Plan
from launcher.rundir import RunDir, write_json


@dataclass(frozen=True)
class Ranks:
    """Where this process stands."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is global rank 0."""
        return self.rank == 0


def initialise(plan: Plan) -> Ranks:
    """Joins the process group. All ranks; raises UserError when they hold different plans or too few came."""
    deepspeed.init_distributed()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(get_accelerator().device_name(local_rank))
    get_accelerator().set_device(local_rank)
    ranks = Ranks(dist.get_rank(), local_rank, dist.get_world_size(), device)
    if ranks.world_size != plan.world_size:
        raise UserError(
            Problem(
                "world size", str(ranks.world_size), f"the plan has {plan.world_size} ranks", "start it with launch.py"
            )
        )
    _agree_on_plan(plan, ranks)
    return ranks


def _agree_on_plan(plan: Plan, ranks: Ranks) -> None:
    mine = torch.tensor(list(bytes.fromhex(plan.fingerprint)), dtype=torch.uint8, device=ranks.device)
    every = [torch.empty_like(mine) for _ in range(ranks.world_size)]
    dist.all_gather(every, mine)
    different = [rank for rank, other in enumerate(every) if not torch.equal(other, every[0])]
    if different:
        raise UserError(
            Problem(
                "plan.json",
                f"ranks {different} hold another plan than rank 0",
                "hosts see different files under the same path",
                "put the run folder on a file system that every host shares",
            )
        )


def meet(ranks: Ranks, what: str, timeout_s: float) -> None:
    """All ranks, before a collective that a rank may come to alone; raises UserError there when not all come in time.

    Through the store at which the ranks first met: a collective would hang, and NCCL's could not be left.
    """
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"zerolaunch/meetings/{ranks.rank}", 1)
    keys = [f"zerolaunch/meet/{number}/{rank}" for rank in range(ranks.world_size)]
    store.set(keys[ranks.rank], what)
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        why = f"ranks {missing} did not come within {timeout_s:g} s, and it takes all of them"
        fix = f"call {what} on every rank, not under `if rank == 0`; what is for one rank happens inside"
        raise UserError(Problem(what, f"rank {ranks.rank} called it", why, fix)) from None


def say(run: RunDir, text: str) -> None:
    """Tells the launcher what is being done now. Any rank may call it; rank 0 acts."""
    if dist.get_rank() == 0:
        write_json(run.status, {"text": text})


def barrier() -> None:
    """Waits for all ranks."""
    dist.barrier()
