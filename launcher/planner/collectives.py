"""Plan -> the collectives of one optimizer step: what DeepSpeed 0.19.8 really calls, as its own logger counts it.

Called when a plan is built; scripts/bench traffic and tests/train compare it with `comms_logger`.
Must never repeat a textbook where the code does something else: stages 1 and 2 all-reduce, and then gather.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.planner.flat import Flat
from launcher.planner.gathering import Counts, Limits, counted, persistent
from launcher.planner.profile import Profile
from launcher.planner.setup import Setup

NODE, NODES, WORLD = "node", "nodes", "world"
SCALE_GROUP = 8000  # elements that share one fp32 scale in qwZ (partition_parameters.py, target_group_size)


@dataclass(frozen=True)
class Move:
    """One kind of collective in one phase of a step, all calls of a rank together."""

    phase: str
    """forward, backward or update."""
    collective: str
    """As DeepSpeed's logger calls it."""
    scope: str
    """world: all ranks; node: those of one host; nodes: one of each host."""
    logged_bytes: int
    """Sizes of the tensors given to it: the whole of what is reduced, a rank's part of an all-gather."""
    sent_bytes: int
    """What a rank sends when the collective runs as a ring."""


def moves(profile: Profile, setup: Setup) -> tuple[Move, ...]:
    """Every collective of one optimizer step; none on one rank, nor those of single numbers (norms, flags)."""
    if setup.world_size == 1:
        return ()
    found = _sharded(profile, setup) if setup.stage == 3 else _replicated(profile, setup)
    return tuple(move for move in found if move.logged_bytes)


def _replicated(profile: Profile, setup: Setup) -> list[Move]:
    """Stages 0 to 2. Gradients are all-reduced in buckets, at stages 1 and 2 too, unless each goes to its owner alone.

    runtime/zero/stage_1_and_2.py, average_tensor: reduce_scatter=true leaves `reduce` calls only without
    use_multi_rank_bucket_allreduce. Stages 0 and 1 do so once a step, stage 2 on every micro-batch.
    """
    owned = setup.stage > 0 and setup.flag("reduce_scatter") and not setup.flag("use_multi_rank_bucket_allreduce")
    times = setup.accumulation if setup.stage == 2 else 1
    reduced = profile.trained * setup.sent * times
    found = [_move("backward", "reduce" if owned else "all_reduce", reduced, setup.world_size)]
    if setup.stage > 0:
        shard = Flat(profile, setup.world_size).share * setup.weight
        found.append(_move("update", "all_gather_into_tensor", shard, setup.world_size))
    return found


def _sharded(profile: Profile, setup: Setup) -> list[Move]:
    """Stage 3: parameters gathered before use, gradients reduce-scattered in every micro-batch, and, once a step,
    the persistent parameters gathered after they were updated (stage3.py, _post_step)."""
    world = setup.world_size
    limits = Limits.of(setup)
    forward, backward = counted(profile, limits)
    sizes = [each.elements for each in profile.parameters]
    found = _gathers(sizes, forward, backward, setup)
    gradient = setup.sent * setup.accumulation
    if setup.flag("zero_quantized_gradients") and setup.hosts > 1:
        found += _quantized_gradients(profile, setup)
    elif setup.flag("reduce_scatter"):
        padded = sum(-(-each.elements // world) * world for each in profile.parameters if each.trained)
        found.append(_move("backward", "reduce_scatter_tensor", padded * gradient, world))
    else:
        found.append(_move("backward", "all_reduce", profile.trained * gradient, world))
    kept = sum(-(-sizes[index] // world) for index in persistent(profile, limits))
    found.append(_move("update", "all_gather_into_tensor", kept * setup.weight, world))
    return found


def _gathers(sizes: list[int], forward: Counts, backward: Counts, setup: Setup) -> list[Move]:
    """Gathers of forward and backward. With hpZ the first of a step is from all ranks, every later one within a host:
    the copy there lives until the optimizer changes the weights (partition_parameters.py, ds_secondary_tensor)."""
    group = setup.number("zero_hpz_partition_size")
    quantized = setup.flag("zero_quantized_weights")
    found: list[Move] = []
    for phase, counts in (("forward", forward), ("backward", backward)):
        whole, near = 0, 0
        for index, times in counts.items():
            size, every = sizes[index], times * setup.accumulation
            first = 0 if phase == "backward" and index in forward else 1
            far = every if group == 1 else min(first, every)
            whole += far * _weight_bytes(-(-size // setup.world_size), setup.weight, quantized)
            near += (every - far) * _weight_bytes(-(-size // group), setup.weight, quantized)
        found.append(_move(phase, "all_gather_into_tensor", whole, setup.world_size))
        found.append(_move(phase, "all_gather_into_tensor", near, group, NODE))
    return found


def _weight_bytes(elements: int, weight: int, quantized: bool) -> int:
    """Of one shard as it travels; qwZ sends int8 and an fp32 scale for each group."""
    return elements + 4 * -(-elements // SCALE_GROUP) if quantized else elements * weight


def _quantized_gradients(profile: Profile, setup: Setup) -> list[Move]:
    """qgZ: int4 to the ranks of the host, and the sums of those to the other hosts (all_to_all_quant_reduce).

    Vectors and what 2 x ranks do not divide are reduce-scattered; a parameter's form is not known here, so those that
    are small enough to be vectors count as such.
    """
    half_bytes = profile.trained * setup.accumulation // 2
    return [
        _move("backward", "all_to_all_single", half_bytes, setup.ranks_per_host, NODE),
        _move("backward", "all_to_all_single", half_bytes // setup.ranks_per_host, setup.hosts, NODES),
    ]


def _move(phase: str, collective: str, logged: int, ranks: int, scope: str = WORLD) -> Move:
    """What a ring of `ranks` sends from each: (n - 1) parts of an all-gather, (n - 1) / n of what is reduced or
    exchanged, twice that in an all-reduce (Patarasuk and Yuan, 2009)."""
    times = {"all_gather_into_tensor": ranks - 1, "all_reduce": 2 * (ranks - 1) / ranks}
    return Move(phase, collective, scope, logged, round(logged * times.get(collective, (ranks - 1) / ranks)))
