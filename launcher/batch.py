"""global batch = micro batch x accumulation x world size: solves what is not given, refuses remainders.

Called when a plan is built. Pure.
Must never round: a batch that does not divide is refused with the nearest that do.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.errors import Problem, UserError
from launcher.schema import TrainSection


@dataclass(frozen=True)
class Batch:
    """Samples per forward and rank, passes per step, samples per step over all ranks."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int


def solve(train: TrainSection, world_size: int) -> Batch:
    """The three sizes for `world_size` ranks; raises UserError when they cannot be made to agree.

    Any two determine the third. With one or none given: the micro batch is `fallback_micro_batch_size`
    and accumulation is 1, except that a given global batch keeps its value and accumulation is solved.
    """
    if isinstance(train.micro_batch_size, str):
        raise UserError(
            Problem(
                "train.micro_batch_size", train.micro_batch_size, "not a number of samples", "use a number, or auto"
            )
        )
    micro, accumulation, total = (
        train.micro_batch_size,
        train.gradient_accumulation_steps,
        train.global_batch_size,
    )
    problems = [
        Problem(f"train.{name}", str(value), "a batch has at least one sample", "use 1 or more")
        for name, value in (
            ("micro_batch_size", micro),
            ("gradient_accumulation_steps", accumulation),
            ("global_batch_size", total),
        )
        if value is not None and value < 1
    ]
    if problems:
        raise UserError(*problems)
    if total is None:
        micro = micro or train.fallback_micro_batch_size
        accumulation = accumulation or 1
        return Batch(micro, accumulation, micro * accumulation * world_size)
    if micro is not None and accumulation is not None:
        expected = micro * accumulation * world_size
        if expected != total:
            raise UserError(
                Problem(
                    "train.global_batch_size",
                    str(total),
                    f"micro {micro} x accumulation {accumulation} x {world_size} ranks = {expected}",
                    f"drop one of the three, or use train.global_batch_size={expected}",
                )
            )
        return Batch(micro, accumulation, total)
    if micro is None and accumulation is None:
        micro = _largest_divisor(total, world_size, train.fallback_micro_batch_size)
    unit = (micro or accumulation or 1) * world_size
    if micro is None and total % unit == 0:
        micro = total // unit
    elif micro is not None and total % unit == 0:
        accumulation = total // unit
    if micro is None or accumulation is None:
        raise UserError(_remainder(total, unit, micro, accumulation, world_size))
    return Batch(micro, accumulation, total)


def formulas(train: TrainSection) -> dict[str, str]:
    """{option: how `solve` finds it} for those of the three that are not given."""
    micro, accumulation, total = train.micro_batch_size, train.gradient_accumulation_steps, train.global_batch_size
    found = {}
    if micro is None and total is None:
        found["train.micro_batch_size"] = "train.fallback_micro_batch_size"
    elif micro is None and accumulation is None:
        found["train.micro_batch_size"] = "largest divisor of a rank's samples up to train.fallback_micro_batch_size"
    elif micro is None:
        found["train.micro_batch_size"] = "global batch / (accumulation x ranks)"
    if accumulation is None:
        found["train.gradient_accumulation_steps"] = (
            "1, as no global batch is given" if total is None else "global batch / (micro batch x ranks)"
        )
    if total is None:
        found["train.global_batch_size"] = "micro batch x accumulation x ranks"
    return found


def _largest_divisor(total: int, world_size: int, limit: int) -> int:
    """Largest micro batch up to `limit` that divides the share of a rank (1 when the share is not whole)."""
    if total % world_size:
        return 1
    share = total // world_size
    return next(size for size in range(min(limit, share), 0, -1) if share % size == 0)


def _remainder(total: int, unit: int, micro: int | None, accumulation: int | None, world_size: int) -> Problem:
    below, above = total // unit * unit, (total // unit + 1) * unit
    factor = f"micro {micro}" if micro is not None else f"accumulation {accumulation}"
    nearest = [str(n) for n in (below, above) if n > 0]
    return Problem(
        "train.global_batch_size",
        str(total),
        f"{total} is not a multiple of {factor} x {world_size} ranks = {unit} (remainder {total % unit})",
        f"use train.global_batch_size={' or '.join(nearest)}, another micro batch, or another number of ranks",
    )
