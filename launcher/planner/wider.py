"""What would make a request fit that fits in no configuration: a smaller batch, more ranks, other parallelism.

Called by `choose` and by the gate for what they print. Judges plans on clusters that do not exist yet.
Must never promise: every figure is of a plan that was judged, or says that none was found.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from launcher.cluster.value import Cluster, Host
from launcher.errors import UserError
from launcher.plan import Plan
from launcher.planner.candidates import (
    Build,
    Candidate,
    Choice,
    judged,
    lacking,
    with_choice,
    with_micro_batch,
    with_small_buckets,
)
from launcher.planner.capacity import GB, Capacity, needed
from launcher.schema import RunConfig

MOST_RANKS = 2**16
DEEPEST = (("stage3", "none"), ("stage3", "cpu"), ("stage3", "cpu_all"))


def resized(cluster: Cluster, ranks: int) -> Cluster:
    """A cluster of `ranks` ranks on hosts like the first of `cluster`; those beyond it do not exist."""
    slots, hosts = cluster.hosts[0].slots, []
    for number, first in enumerate(range(0, ranks, len(slots))):
        name = cluster.hosts[number].name if number < len(cluster.hosts) else f"host{number + 1}"
        hosts.append(Host(name, slots[: ranks - first]))
    return Cluster(tuple(hosts), cluster.accelerator, cluster.local and len(hosts) == 1)


def smaller_batches(config: RunConfig, plan: Plan) -> list[tuple[list[str], RunConfig]]:
    """Half the micro-batch of `plan`, a quarter and so on, at the same global batch: overrides and request of each."""
    found: list[tuple[list[str], RunConfig]] = []
    size, total = plan.batch.micro_batch_size // 2, plan.batch.global_batch_size
    while size >= 1:
        if total % (size * plan.world_size) == 0:
            sizes: dict[str, Any] = {
                "micro_batch_size": size,
                "gradient_accumulation_steps": None,
                "global_batch_size": total,
            }
            words = [f"train.{name}={'null' if value is None else value}" for name, value in sizes.items()]
            changed = {name for name, value in sizes.items() if getattr(config.train, name) != value}
            words = [word for name, word in zip(sizes, words, strict=True) if name in changed]
            found.append((words, dataclasses.replace(config, train=dataclasses.replace(config.train, **sizes))))
        size //= 2
    return found


def what_would_fit(config: RunConfig, plan: Plan, capacity: Capacity, build: Build) -> list[str]:
    """One line for each thing that would help, with its figures. `plan`: any of the request, for batch and cluster."""
    smaller = _smaller(config, plan, capacity, build)
    lines = [] if smaller is None else [f"on these ranks: {' '.join(smaller.overrides)}"]
    words, stretched = _stretched(config, plan)
    ranks = _ranks(stretched, plan.cluster, capacity, build)
    if ranks is not None:
        lines.append(f"more ranks: {ranks} of them at {' '.join(words)} (here are {plan.world_size})")
        return lines
    try:
        widest = build(stretched, resized(plan.cluster, MOST_RANKS))
    except UserError:
        return lines or ["a smaller model, or ranks with more memory"]
    assert widest.estimate.memory is not None
    sizes = needed(widest.estimate.memory, capacity)
    where, (wants, has) = max(sizes.items(), key=lambda item: item[1][0] - item[1][1])
    ways = -(-wants // has) if has else 0
    lines.append(
        f"tensor or pipeline parallelism: {wants / GB:,.2f} GB for the {where} stay on a rank at stage 3 however many "
        f"ranks there are, and it may use {has / GB:,.2f}: split {ways} ways at least"
    )
    return lines


def _smaller(config: RunConfig, plan: Plan, capacity: Capacity, build: Build) -> Candidate | None:
    """The same ranks with smaller buckets or, beside them, a smaller micro-batch, at the stage that keeps least."""
    requests = [([], config), *smaller_batches(config, plan)]
    if not any(
        _deep(words, request, *pair, capacity, build).fits for words, request in requests[-1:] for pair in DEEPEST
    ):
        return None
    for words, request in requests:
        for zero, offload in DEEPEST:
            candidate = _deep(words, request, zero, offload, capacity, build)
            if candidate.fits:
                return candidate
    return None


def _deep(words: list[str], request: RunConfig, zero: str, offload: str, capacity: Capacity, build: Build) -> Candidate:
    choice = Choice(zero, offload, "full")
    more, small = with_small_buckets(with_choice(request, choice))
    return judged([*words, *choice.overrides(), *more], small, capacity, build, closely=False)


def _stretched(config: RunConfig, plan: Plan) -> tuple[list[str], RunConfig]:
    """Overrides and request of stage 3 with recomputed activations, whose global batch grows with the ranks."""
    choice = Choice("stage3", "none", "full")
    words, small = with_small_buckets(with_choice(config, choice))
    deepest = with_micro_batch(small, plan.batch.micro_batch_size)
    train = dataclasses.replace(deepest.train, gradient_accumulation_steps=1, global_batch_size=None)
    return choice.overrides() + words, dataclasses.replace(deepest, train=train)


def _ranks(config: RunConfig, cluster: Cluster, capacity: Capacity, build: Build) -> int | None:
    """The least number of ranks, in whole hosts, at which the request fits; more ranks never need more each."""
    slots = len(cluster.hosts[0].slots)

    def fits(hosts: int) -> bool:
        try:
            return lacking(build(config, resized(cluster, hosts * slots), capacity), capacity) == {}
        except UserError:
            return False

    low, most = len(cluster.hosts), MOST_RANKS // slots
    high = min(2 * low, most)
    if most <= low:
        return None
    while not fits(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * slots
