"""Bytes each rank sends per optimizer step, by phase, for a stage.

Called when a plan is built. Pure arithmetic; source: the ZeRO paper's section 7 (2Ψ for stages 0 to 2, 3Ψ for stage 3).
Must never turn bytes into seconds: link speeds are not known here.
"""

from __future__ import annotations

from launcher.planner.memory import WEIGHT_BYTES


def bytes_per_step(
    parameters: int, stage: int, world_size: int, precision: str, accumulation: int, frozen: int = 0
) -> dict[str, int]:
    """{forward, backward, update, total} in bytes per rank; zero on one rank.

    `frozen` parameters beside the trained ones are only ever gathered, at stage 3.
    Stage 2 reduces gradients, and stage 3 gathers weights too, on each of the `accumulation` micro-batches.
    """
    unit = parameters * WEIGHT_BYTES[precision] if world_size > 1 else 0
    forward = backward = update = 0
    if stage == 0:
        backward = 2 * unit
    elif stage == 1:
        backward, update = unit, unit
    elif stage == 2:
        backward, update = unit * accumulation, unit
    else:
        whole = unit + (frozen * WEIGHT_BYTES[precision] if world_size > 1 else 0)
        forward, backward = whole * accumulation, (whole + unit) * accumulation
    return {"forward": forward, "backward": backward, "update": update, "total": forward + backward + update}
