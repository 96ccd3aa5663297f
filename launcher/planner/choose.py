"""`auto` -> the configuration of least cost that fits: stage, offload, activation checkpointing and micro-batch.

Called by `launcher.cli` on a request that leaves one of them to the planner. What comes out has no auto left in it.
Must never take what is not known to fit, nor pass over a cheaper one that does.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.ds_values import AUTO
from launcher.errors import EXIT_DOES_NOT_FIT, Problem, UserError
from launcher.plan import Plan
from launcher.planner.candidates import Build, Candidate, Choice, choices, judged, with_choice, with_micro_batch
from launcher.planner.capacity import Capacity, told
from launcher.planner.wider import what_would_fit
from launcher.schema import RunConfig

MICRO = "train.micro_batch_size"
NAMES = ("zero", "offload", "activation", MICRO)
LARGEST_MICRO_BATCH = 1024  # samples of a rank; a larger one gains nothing that more accumulation does not


@dataclass(frozen=True)
class Chosen:
    """A request in which nothing is left to choose, and how it came about."""

    config: RunConfig
    plan: Plan
    overrides: list[str]
    """What stands for the autos."""
    rejected: list[Candidate]
    """Those before it in the order, each refused or too big."""


def autos(config: RunConfig) -> list[str]:
    """The ones of NAMES that the request leaves to the planner."""
    zero = config.deepspeed.get("zero_optimization", {})
    device = (zero.get("offload_optimizer") or {}).get("device")
    said = (zero.get("stage"), device, config.activation.checkpointing, config.train.micro_batch_size)
    return [name for name, value in zip(NAMES, said, strict=True) if value == AUTO]


def choose(config: RunConfig, world_size: int, capacity: Capacity | None, build: Build) -> Chosen:
    """The first in the order of `candidates` that fits, at the smallest micro-batch where that is free, then grown.

    Raises UserError: 3 with what would fit where nothing does, 2 where what fits cannot be told.
    """
    free = autos(config)
    if capacity is None:
        why = "nobody said how much memory a rank has, so what fits cannot be told"
        raise UserError(Problem(free[0], AUTO, why, "add plan.memory_bytes=BYTES, of one rank's device"))
    rejected: list[Candidate] = []
    for choice in choices(config, set(free)):
        tried = with_choice(config, choice)
        sizes: list[int | None] = micro_batches(tried, world_size) if MICRO in free else [None]
        smallest = _judged(choice, tried, sizes[0], capacity, build)
        _refuse_unknown(smallest, free)
        if not smallest.fits:
            rejected.append(smallest)
            continue
        size, best = _largest(choice, tried, sizes, smallest, capacity, build)
        assert best.plan is not None
        return Chosen(_sized(tried, size), best.plan, best.overrides, rejected)
    if not any(candidate.lacks for candidate in rejected):
        raise UserError(*_refusals(rejected))
    raise UserError(_nothing(config, free, rejected, capacity, build), code=EXIT_DOES_NOT_FIT)


def micro_batches(config: RunConfig, world_size: int) -> list[int | None]:
    """Powers of two that can be a rank's micro-batch, upwards; [None] where the other two sizes decide it."""
    total, passes = config.train.global_batch_size, config.train.gradient_accumulation_steps
    if total is not None and passes is not None:
        return [None]
    powers = [2**power for power in range(LARGEST_MICRO_BATCH.bit_length())]
    share = total // world_size if total is not None else 0
    return [size for size in powers if share % size == 0]


def _largest(
    choice: Choice, tried: RunConfig, sizes: list[int | None], smallest: Candidate, capacity: Capacity, build: Build
) -> tuple[int | None, Candidate]:
    """The largest of `sizes` that fits, where the first one does: by halves, as a larger one never needs less."""
    low, high, best = 0, len(sizes), smallest
    while high - low > 1:
        middle = (low + high) // 2
        candidate = _judged(choice, tried, sizes[middle], capacity, build)
        if candidate.fits:
            low, best = middle, candidate
        else:
            high = middle
    return sizes[low], best


def _judged(choice: Choice, tried: RunConfig, size: int | None, capacity: Capacity, build: Build) -> Candidate:
    words = choice.overrides() + ([f"{MICRO}={size}"] if size is not None else [])
    return judged(words, _sized(tried, size), capacity, build)


def _sized(tried: RunConfig, size: int | None) -> RunConfig:
    """The request with a micro-batch in the place of its auto; one that was given stays."""
    return with_micro_batch(tried, size) if tried.train.micro_batch_size == AUTO else tried


def _refuse_unknown(candidate: Candidate, free: list[str]) -> None:
    """Raises UserError where what is asked for cannot be told of this model."""
    if candidate.plan is None:
        return
    memory = candidate.plan.estimate.memory
    if memory is None:
        fix = "choose yourself"
        raise UserError(Problem(free[0], AUTO, "the number of this model's parameters is not known", fix))
    if MICRO in free and not memory.measured:
        why = "what this model's activations take is not known, so neither is which batch fits"
        raise UserError(Problem(MICRO, AUTO, why, f"give {MICRO} a number"))


def _refusals(rejected: list[Candidate]) -> list[Problem]:
    """Why no candidate is a request at all, each reason once."""
    first = {candidate.refused: " ".join(candidate.overrides) for candidate in reversed(rejected)}
    return [Problem(words, "auto", str(why), "change the request, or choose yourself") for why, words in first.items()]


def _nothing(
    config: RunConfig, free: list[str], rejected: list[Candidate], capacity: Capacity, build: Build
) -> Problem:
    where = " ".join(f"{name}=auto" for name in free)
    unfit = [candidate for candidate in rejected if candidate.lacks]
    plan = unfit[0].plan
    assert plan is not None
    nearest = min(unfit, key=lambda candidate: sum((candidate.lacks or {}).values()))
    got = f"{len(unfit)} configurations; the nearest, {' '.join(nearest.overrides)}, has {told(nearest.lacks or {})}"
    return Problem(where, got, "none of them fits", "\n".join(what_would_fit(config, plan, capacity, build)))
