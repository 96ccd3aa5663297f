"""One plan beside others: every stage x offload x activation checkpointing, or other numbers of ranks.

Called by `report` for mode=plan. Pure but for the plans it has built.
Must never leave a combination out without saying why.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.cluster.value import Cluster
from launcher.errors import UserError
from launcher.plan import Plan
from launcher.planner.candidates import (
    ACTIVATIONS,
    OFFLOADS,
    ORDER,
    STAGES,
    Build,
    Choice,
    lacking,
    nvme_path,
    offload_of,
    with_choice,
)
from launcher.planner.capacity import Capacity, Machine, capacity_of
from launcher.planner.wider import resized
from launcher.schema import RunConfig


@dataclass(frozen=True)
class Row:
    """One configuration, judged. Bytes are of a rank; None where there is no plan, or its size is not known."""

    overrides: list[str]
    ranks: int
    current: bool
    """Whether it is what was asked for."""
    refused: str | None = None
    """What the rules say against it."""
    peak_bytes: int | None = None
    moment: str | None = None
    """Moment of the step at which the peak is."""
    host_bytes: int | None = None
    sent_bytes: int | None = None
    """Per optimizer step."""
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    lacks: dict[str, int] | None = None
    """{device or host: bytes too much}; None where no capacity is known."""


def combinations(plan: Plan, capacity: Capacity | None, build: Build) -> list[Row]:
    """Every stage x offload x activation checkpointing in the order of cost; last those that no rule lets through."""
    config = plan.config
    offloads = [offload for offload in OFFLOADS if offload != "nvme" or nvme_path(config) is not None]
    rest = [(zero, offload) for zero in STAGES for offload in offloads if (zero, offload) not in ORDER]
    pairs = [pair for pair in ORDER if pair[1] in offloads] + rest
    now = (f"stage{plan.zero_stage}", offload_of(config), ACTIVATIONS[bool(config.activation.checkpointing)])
    rows = []
    for zero, offload in pairs:
        for activation in ACTIVATIONS:
            choice = Choice(zero, offload, activation)
            changed = with_choice(config, choice)
            rows.append(
                _row(choice.overrides(), changed, plan.cluster, capacity, build, now == (zero, offload, activation))
            )
    return rows


def sizes(plan: Plan, machine: Machine, build: Build) -> list[Row]:
    """The same configuration on each of plan.scale's numbers of ranks, over hosts like the plan's first."""
    rows = []
    for ranks in plan.config.plan.scale:
        cluster = resized(plan.cluster, ranks)
        capacity = capacity_of(plan.config, cluster, machine) or capacity_of(plan.config, plan.cluster, machine)
        rows.append(_row([], plan.config, cluster, capacity, build, ranks == plan.world_size))
    return rows


def _row(
    words: list[str], config: RunConfig, cluster: Cluster, capacity: Capacity | None, build: Build, now: bool
) -> Row:
    try:
        plan = build(config, cluster)
    except UserError as error:
        why = "; ".join(problem.why for problem in error.problems)
        return Row(words, cluster.world_size, now, why)
    memory, batch = plan.estimate.memory, plan.batch
    return Row(
        overrides=words,
        ranks=plan.world_size,
        current=now,
        peak_bytes=memory.peak.total_bytes if memory else None,
        moment=memory.peak.name if memory else None,
        host_bytes=memory.host_bytes if memory else None,
        sent_bytes=plan.estimate.traffic_bytes.get("total"),
        micro_batch_size=batch.micro_batch_size,
        global_batch_size=batch.global_batch_size,
        lacks=lacking(plan, capacity),
    )
