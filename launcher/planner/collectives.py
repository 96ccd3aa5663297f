"""Plan -> the collectives of one optimizer step: what DeepSpeed 0.19.8 really calls, as its own logger counts it.

Called when a plan is built; scripts/bench traffic and tests/train compare it with `comms_logger`.
Must never repeat a textbook where the code does something else: stages 1 and 2 all-reduce, and then gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.planner.gathering import Counts, Limits, counted, persistent
from launcher.planner.memory import WEIGHT_BYTES
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


@dataclass(frozen=True)
class Step:
    """What decides the collectives of a step beside the model. `hosts` have equally many ranks."""

    stage: int
    world_size: int
    hosts: int
    precision: str
    micro_batches: int
    recomputed: bool
    zero: dict[str, Any]
    """The zero_optimization block."""
    communication: str
    """Element type that gradients travel in."""

    @property
    def local(self) -> int:
        """Ranks of a host."""
        return self.world_size // self.hosts


def moves(profile: Profile, setup: Setup, step: Step) -> tuple[Move, ...]:
    """Every collective of one optimizer step; none on one rank, nor those of single numbers (norms, flags)."""
    if step.world_size == 1:
        return ()
    found = _sharded(profile, setup, step) if step.stage == 3 else _replicated(profile, step)
    return tuple(move for move in found if move.logged_bytes)


def _replicated(profile: Profile, step: Step) -> list[Move]:
    """Stages 0 to 2. Gradients are all-reduced in buckets, at stages 1 and 2 too, unless each goes to its owner alone.

    runtime/zero/stage_1_and_2.py, average_tensor: reduce_scatter=true leaves `reduce` calls only without
    use_multi_rank_bucket_allreduce. Stages 0 and 1 do so once a step, stage 2 on every micro-batch.
    """
    elements, zero = profile.trained, step.zero
    owned = (
        step.stage > 0 and zero.get("reduce_scatter", True) and not zero.get("use_multi_rank_bucket_allreduce", True)
    )
    times = step.micro_batches if step.stage == 2 else 1
    reduced = elements * WEIGHT_BYTES[step.communication] * times
    found = [_move("backward", "reduce" if owned else "all_reduce", reduced, step.world_size)]
    if step.stage > 0:
        padded = -(-elements // (2 * step.world_size)) * 2  # of a rank; starts are aligned to two elements
        shard = padded * WEIGHT_BYTES[step.precision]
        found.append(_move("update", "all_gather_into_tensor", shard, step.world_size))
    return found


def _sharded(profile: Profile, setup: Setup, step: Step) -> list[Move]:
    """Stage 3: parameters gathered before use, gradients reduce-scattered in every micro-batch, and, once a step,
    the persistent parameters gathered after they were updated (stage3.py, _post_step)."""
    world, zero = step.world_size, step.zero
    limits = Limits.of(setup)
    forward, backward = counted(profile, limits)
    sizes = [each.elements for each in profile.parameters]
    found = _gathers(sizes, forward, backward, step)
    gradient = WEIGHT_BYTES[step.communication] * step.micro_batches
    if zero.get("zero_quantized_gradients") and step.hosts > 1:
        found += _quantized_gradients(profile, step)
    elif zero.get("reduce_scatter", True):
        padded = sum(-(-each.elements // world) * world for each in profile.parameters if each.trained)
        found.append(_move("backward", "reduce_scatter_tensor", padded * gradient, world))
    else:
        found.append(_move("backward", "all_reduce", profile.trained * gradient, world))
    kept = sum(-(-sizes[index] // world) for index in persistent(profile, limits))
    found.append(_move("update", "all_gather_into_tensor", kept * WEIGHT_BYTES[step.precision], world))
    return found


def _gathers(sizes: list[int], forward: Counts, backward: Counts, step: Step) -> list[Move]:
    """Gathers of forward and backward. With hpZ the first of a step is from all ranks, every later one within a host:
    the copy there lives until the optimizer changes the weights (partition_parameters.py, ds_secondary_tensor)."""
    group = int(step.zero.get("zero_hpz_partition_size") or 1)
    quantized = bool(step.zero.get("zero_quantized_weights"))
    found: list[Move] = []
    for phase, counts in (("forward", forward), ("backward", backward)):
        whole, near = 0, 0
        for index, times in counts.items():
            size, every = sizes[index], times * step.micro_batches
            first = 0 if phase == "backward" and index in forward else 1
            far = every if group == 1 else min(first, every)
            whole += far * _weight_bytes(-(-size // step.world_size), step.precision, quantized)
            near += (every - far) * _weight_bytes(-(-size // group), step.precision, quantized)
        found.append(_move(phase, "all_gather_into_tensor", whole, step.world_size))
        found.append(_move(phase, "all_gather_into_tensor", near, group, NODE))
    return found


def _weight_bytes(elements: int, precision: str, quantized: bool) -> int:
    """Of one shard as it travels; qwZ sends int8 and an fp32 scale for each group."""
    return elements + 4 * -(-elements // SCALE_GROUP) if quantized else elements * WEIGHT_BYTES[precision]


def _quantized_gradients(profile: Profile, step: Step) -> list[Move]:
    """qgZ: int4 to the ranks of the host, and the sums of those to the other hosts (all_to_all_quant_reduce).

    Vectors and what 2 x ranks do not divide are reduce-scattered; a parameter's form is not known here, so those that
    are small enough to be vectors count as such.
    """
    half_bytes = profile.trained * step.micro_batches // 2
    return [
        _move("backward", "all_to_all_single", half_bytes, step.local, NODE),
        _move("backward", "all_to_all_single", half_bytes // step.local, step.hosts, NODES),
    ]


def _move(phase: str, collective: str, logged: int, ranks: int, scope: str = WORLD) -> Move:
    """What a ring of `ranks` sends from each: (n - 1) parts of an all-gather, (n - 1) / n of what is reduced or
    exchanged, twice that in an all-reduce (Patarasuk and Yuan, 2009)."""
    times = {"all_gather_into_tensor": ranks - 1, "all_reduce": 2 * (ranks - 1) / ranks}
    return Move(phase, collective, scope, logged, round(logged * times.get(collective, (ranks - 1) / ranks)))
