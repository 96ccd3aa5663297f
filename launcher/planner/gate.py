"""A run that cannot fit -> the refusal that says by how much, with the least costly changes that would fit.

Called by `launcher.cli` before a run is prepared or submitted, and by mode=plan for what it says of the same.
Must never refuse on a guess: without a known size and a known capacity there is nothing to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from launcher.errors import Problem
from launcher.plan import Plan
from launcher.planner.candidates import (
    ACTIVATIONS,
    Build,
    Candidate,
    Choice,
    choices,
    judged,
    lacking,
    offload_of,
    with_choice,
    with_small_buckets,
)
from launcher.planner.capacity import GB, Capacity, needed
from launcher.planner.wider import smaller_batches, what_would_fit

CHANGES = 3
FORCE = "plan.force=true starts it as it is"


def unfit(plan: Plan, capacity: Capacity | None, build: Build) -> Problem | None:
    """What is wrong with starting `plan`; None where it fits, or where that is not known."""
    lacks = lacking(plan, capacity)
    if not lacks or capacity is None:
        return None
    assert plan.estimate.memory is not None
    sizes = needed(plan.estimate.memory, capacity)
    got = ", ".join(f"{wants / GB:,.2f} GB of {where}" for where, (wants, _) in sizes.items() if where in lacks)
    may = ", ".join(f"{sizes[where][1] / GB:,.2f} GB" for where in lacks)
    why = f"a rank may use {may} ({capacity.source}); its peak is at {_moment(plan)}"
    found = cheapest(plan, capacity, build)
    ways = [" ".join(candidate.overrides) for candidate in found]
    ways = ways or what_would_fit(plan.config, plan, capacity, build)
    return Problem("memory of a rank", got, why, "\n".join([*ways, FORCE]))


def cheapest(plan: Plan, capacity: Capacity, build: Build) -> list[Candidate]:
    """The first CHANGES in order of cost that fit: a smaller micro-batch, then stages and offloads."""
    config, ask = plan.config, partial(judged, capacity=capacity, build=build, closely=False)
    found = _first(ask(words, request) for words, request in smaller_batches(config, plan))
    if plan.estimate.reduce_bucket_bytes:
        words, request = with_small_buckets(config)
        found += _first([ask(words, request)] if words else [])
    now = bool(config.activation.checkpointing)
    for pair in dict.fromkeys((choice.zero, choice.offload) for choice in choices(config, {"zero", "offload"})):
        if len(found) == CHANGES:
            break
        # Where it does not fit with recomputed activations it does not without: that one is asked first.
        tried = [Choice(*pair, activation) for activation in ACTIVATIONS[now:]]
        made = [ask(_changed(plan, tried[-1]), with_choice(config, tried[-1]))]
        if made[0].fits and len(tried) > 1:
            made = [ask(_changed(plan, tried[0]), with_choice(config, tried[0])), *made]
        found += _first(made)
    return found


def _first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The first that fits, if any does."""
    return next(([candidate] for candidate in candidates if candidate.fits), [])


def _changed(plan: Plan, choice: Choice) -> list[str]:
    """The overrides of `choice` that are not the plan's own."""
    now = Choice(
        f"stage{plan.zero_stage}",
        offload_of(plan.config),
        "full" if plan.config.activation.checkpointing else "none",
    ).overrides()
    return [word for word in choice.overrides() if word not in now]


def _moment(plan: Plan) -> str:
    assert plan.estimate.memory is not None
    peak = plan.estimate.memory.peak
    largest = max(peak.terms.items(), key=lambda item: item[1])
    return f"{peak.name}, where {largest[0]} take {largest[1] / GB:,.2f} GB"
