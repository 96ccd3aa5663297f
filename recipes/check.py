"""How fast the ranks talk: an all-reduce over all of them, and every two hosts with each other.

Run on every rank by `recipes.worker` for `mode=check`; no model, no data.
Must never take longer than seconds: sizes are fixed, and hosts beyond MAX_ROUNDS meet their neighbours only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from launcher.plan import Plan
from launcher.rundir import RunDir, write_json
from recipes.shared import distributed
from recipes.shared.distributed import Ranks

SIZE = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}  # bytes
REPEATS = 5
MAX_ROUNDS = 31  # every two of 32 hosts


def run(plan: Plan, run_dir: RunDir) -> None:
    """All ranks; rank 0 writes control/result.json."""
    ranks = distributed.initialise(plan)
    distributed.say(run_dir, "measuring a collective")
    result: dict[str, Any] = {"all_reduce": all_reduce(ranks), "pairs": host_pairs(plan, ranks)}
    if ranks.world_size > 1:  # as hardware.file reads it; a ring over all ranks leaves each host once
        link = "network" if len(plan.cluster.hosts) > 1 else "node"
        result["hardware"] = {f"{link}_bytes_per_s": result["all_reduce"]["gb_per_s"] * 1e9}
    if ranks.is_main:
        write_json(run_dir.result, result)


def all_reduce(ranks: Ranks, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """{ranks, bytes, seconds, gb_per_s}: bus bandwidth, 2 (n - 1) / n x bytes / time; the best of REPEATS. All ranks.

    `group`: this rank's, where several do the same side by side; the slowest counts.
    """
    tensor = torch.ones(SIZE[ranks.device.type] // 4, device=ranks.device)
    seconds = best(lambda: dist.all_reduce(tensor, group=group), ranks)
    size = dist.get_world_size(group)
    moved = 2 * (size - 1) / size * tensor.numel() * 4
    return {
        "ranks": size,
        "bytes": tensor.numel() * 4,
        "seconds": seconds,
        "gb_per_s": moved / seconds / 1e9,
    }


def host_pairs(plan: Plan, ranks: Ranks) -> list[dict[str, Any]]:
    """[{hosts, gb_per_s}] of every two hosts, by a tensor that goes there and back. All ranks.

    The first rank of each host takes part, in the rounds of a round-robin tournament: no host is in two pairs at once.
    """
    heads, first = [], 0
    for host in plan.cluster.hosts:
        heads.append(first)
        first += len(host.slots)
    names = [host.name for host in plan.cluster.hosts]
    tensor = torch.ones(SIZE[ranks.device.type] // 16, device=ranks.device)
    mine = []
    for pairs in tournament(len(heads))[:MAX_ROUNDS]:
        for left, right in pairs:
            if ranks.rank in (heads[left], heads[right]):
                seconds = min(_there_and_back(tensor, ranks, heads[left], heads[right]) for _ in range(REPEATS))
                if ranks.rank == heads[left]:
                    speed = 2 * tensor.numel() * 4 / seconds / 1e9
                    mine.append({"hosts": [names[left], names[right]], "gb_per_s": speed})
        distributed.barrier()
    every: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(every, mine)
    return [pair for part in every for pair in part]


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Rounds in which everyone meets everyone once and nobody plays twice in a round (circle method)."""
    seats = list(range(players + players % 2))  # the last one of an odd number sits out
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < players])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _there_and_back(tensor: torch.Tensor, ranks: Ranks, left: int, right: int) -> float:
    started = time.perf_counter()
    if ranks.rank == left:
        dist.send(tensor, right)
        dist.recv(tensor, right)
    else:
        dist.recv(tensor, left)
        dist.send(tensor, left)
    _synchronise(ranks)
    return time.perf_counter() - started


def best(work: Callable[[], Any], ranks: Ranks) -> float:
    """Shortest time of `work` on the slowest rank, in seconds. All ranks."""
    times = []
    for _ in range(REPEATS + 1):  # the first opens the connections
        distributed.barrier()
        _synchronise(ranks)
        started = time.perf_counter()
        work()
        _synchronise(ranks)
        times.append(time.perf_counter() - started)
    slowest = torch.tensor(times[1:], dtype=torch.float64, device=ranks.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.min())


def _synchronise(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
