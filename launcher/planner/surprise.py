"""Planned memory and what a run measured -> both side by side, and what differs enough to have a cause.

Called when a run has ended. Pure: figures of rank 0, in bytes.
Must never call rounding a surprise: what differs by no more than SHARE or FLOOR_BYTES is as planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.planner.prediction import Memory

SHARE, FLOOR_BYTES = 0.05, 1_000_000
# Reserved over allocated: what torch's allocator could not hand out. 10 to 20 % are usual; beyond that it is worth a
# setting.
FRAGMENTED = 1.20
# Where activations are unknown so is each parameter's size, and these are planned from pieces of equal size.
BY_PARAMETER = ("gathered parameters", "weights on their way", "gradients on their way", "accumulated gradients")
# Planned for the rank that owns most, and so an upper bound for rank 0.
OF_THE_LARGEST = ("accumulated gradients",)
STATE = ("master", "moments", "offloaded gradients", "average")
TERMS = {
    "weights": "another precision, or parameters that the plan does not know of; effective.json has what is in force",
    "master": "another precision or another number of trained parameters; compare effective.json with the request",
    "moments": "another optimizer, or other parameters are trained; compare effective.json with the request",
    "gradients": "they are kept or added up in another precision, or not freed; do not keep references to .grad",
    "reduce buckets": "another reduce_bucket_size or contiguous_gradients is in force; effective.json has it",
    "gathered parameters": "parameters stay whole that the plan lets go: lower stage3_param_persistence_threshold and "
    "stage3_max_live_parameters, and keep no references to gathered weights",
}
UNKNOWN = "compare effective.json, what the engine runs with, with the request"


@dataclass(frozen=True)
class Setting:
    """What a run's plan says of how state is split."""

    stage: int
    world_size: int


def compared(memory: Memory, setting: Setting, exact: bool, measured: dict[str, Any]) -> dict[str, Any]:
    """{planned_peak_bytes, measured_peak_bytes, reserved_bytes, terms: {term: {planned, measured}}, surprises}.

    `exact`: whether the plan knows which parameters are trained, and all that it plans lies in memory; if not nothing
    is planned that could surprise.
    `measured`: {"terms": bytes by term} and on a GPU "allocated_bytes" and "reserved_bytes", both at their highest.
    """
    terms = {
        term: {"planned": _planned(memory, exact, term), "measured": measured["terms"].get(term, 0)}
        for term in (*memory.resident, *(term for term in measured["terms"] if term not in memory.resident))
    }
    peak = memory.peak.total_bytes if memory.measured and memory.moments else None
    allocated, reserved = measured.get("allocated_bytes"), measured.get("reserved_bytes")
    found = [text for term, both in terms.items() for text in _of_term(term, both, setting)]
    found += _of_peak(memory, setting, allocated, as_planned=not found)
    if allocated and reserved and reserved > FRAGMENTED * allocated and reserved - allocated > FLOOR_BYTES:
        found.append(
            f"{_gb(reserved)} are reserved for {_gb(allocated)} that were allocated at most: memory is in pieces; "
            "cluster.env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets it grow together"
        )
    return {
        "planned_peak_bytes": peak,
        "measured_peak_bytes": allocated,
        "reserved_bytes": reserved,
        "terms": terms,
        "surprises": found,
    }


def lines(figures: dict[str, Any]) -> list[str]:
    """What is shown of `compared` when a run has ended."""
    known = [both for both in figures["terms"].values() if both["planned"] is not None]
    held, meant = (sum(both[which] for both in known) for which in ("measured", "planned"))
    peak, planned = figures["measured_peak_bytes"], figures["planned_peak_bytes"]
    parts = [f"between steps a rank holds {_gb(held)}, {_gb(meant)} planned"] if known else []
    if peak is not None:
        parts.append(f"peak {_gb(peak)}" + ("" if planned is None else f", {_gb(planned)} planned"))
    first = [f"memory:    {'; '.join(parts)}"] if parts else []
    return first + [f"surprise:  {text}" for text in figures["surprises"]]


def _planned(memory: Memory, exact: bool, term: str) -> int | None:
    """None where the plan does not know."""
    if not exact or (not memory.measured and term in BY_PARAMETER):
        return None
    return memory.resident.get(term, 0)


def differs(planned: int, measured: int) -> bool:
    """Whether it is more than rounding, and more than anyone would miss."""
    return abs(measured - planned) > max(SHARE * planned, FLOOR_BYTES)


def _of_term(term: str, both: dict[str, int | None], setting: Setting) -> Iterator[str]:
    planned, measured = both["planned"], both["measured"] or 0
    if planned is None or not differs(planned, measured) or (term in OF_THE_LARGEST and measured < planned):
        return
    yield f"{term}: {_gb(measured)} held, {_told(planned, measured)}: {_cause(term, planned, measured, setting)}"


def _cause(term: str, planned: int, measured: int, setting: Setting) -> str:
    ranks = setting.world_size
    whole = ranks > 1 and planned > 0 and abs(measured - ranks * planned) <= SHARE * ranks * planned
    if whole and term == "weights" and setting.stage == 3:
        return f"they are whole where they should be split over {ranks} ranks, so stage 3 is not in force"
    if whole and term in STATE and setting.stage > 0:
        return f"it is whole where it should be split over {ranks} ranks, so stage {setting.stage} is not in force"
    if term == "moments" and measured == 0:
        return "the optimizer took no step; in fp16 every one may have overflowed, and bf16 would not"
    return TERMS.get(term, UNKNOWN)


def _of_peak(memory: Memory, setting: Setting, peak: int | None, as_planned: bool) -> Iterator[str]:
    """The peak, where the terms that stay do not explain it already."""
    if peak is None or not memory.measured or not memory.moments or not as_planned:
        return
    planned, moment = memory.peak.total_bytes, memory.peak.name
    if not differs(planned, peak):
        return
    if peak < planned:
        cause = "fewer activations than planned, from another attention kernel or shorter batches: a larger "
        cause += "train.micro_batch_size may fit"
    else:
        lower = "lower stage3_max_live_parameters and stage3_prefetch_bucket_size, " if setting.stage == 3 else ""
        cause = "what stays between steps is as planned, so it is activations, of another attention kernel or a longer "
        cause += f"batch, or buckets{' and prefetch' if setting.stage == 3 else ''}: activation=full, {lower}or a "
        cause += "smaller train.micro_batch_size"
    yield f"peak: {_gb(peak)} allocated, {_told(planned, peak)} (in the moment {moment!r}): {cause}"


def _told(planned: int, measured: int) -> str:
    if planned == 0:
        return "none planned"
    return f"{_gb(planned)} planned ({(measured - planned) / planned:+.0%})"


def _gb(size: int) -> str:
    return f"{size / 1e9:,.3f} GB"
