"""Everything mode=plan says beside the plan itself, as plain values: judged memory, disk, comparisons, omissions.

Called by `launcher.cli`; `launcher.show_plan` prints it, `launcher.plan_page` draws it, plan.format=json holds it.
Must never be part of the plan: it speaks of the machine that plans, and of plans that were not chosen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from launcher.cluster.checks import room_needed
from launcher.plan import Plan
from launcher.planner.candidates import Candidate
from launcher.planner.capacity import needed
from launcher.planner.compare import combinations, sizes
from launcher.planning import Prospect

NOT_MEASURED = (
    "activations, logits and the loss of a micro-batch",
    "parameters gathered for the layers at work, and those fetched ahead",
)
NEVER = (
    "Python, torch and the other libraries of a process in host memory",
    "the corpus and the batches of a data loader in host memory",
    "what a module or a recipe of your own allocates",
)
ON_CUDA = "fragmentation and the CUDA context: the reserve of what a rank may use is left for them"


def report(found: Prospect) -> dict[str, Any]:
    """JSON of one prospect, sizes in bytes and of one rank unless their name says otherwise."""
    plan, capacity, memory = found.plan, found.capacity, found.plan.estimate.memory
    problem = found.problem()
    asked = plan.config.plan
    return {
        "capacity": None if capacity is None else dataclasses.asdict(capacity),
        "needed": {} if memory is None or capacity is None else needed(memory, capacity),
        "fits": None if memory is None or capacity is None else problem is None,
        "problem": None if problem is None else dataclasses.asdict(problem),
        "peak": None if memory is None else {"moment": memory.peak.name, "bytes": memory.peak.total_bytes},
        "checkpoint": checkpoints(plan),
        "not_included": left_out(plan),
        "advice": advice(plan, capacity is None),
        "chosen": None if found.chosen is None else found.chosen.overrides,
        "rejected": [] if found.chosen is None else [_told(candidate) for candidate in found.chosen.rejected],
        "compare": [dataclasses.asdict(row) for row in combinations(plan, capacity, found.build)]
        if asked.compare
        else [],
        "scale": [dataclasses.asdict(row) for row in sizes(plan, found.machine, found.build)],
    }


def checkpoints(plan: Plan) -> dict[str, Any] | None:
    """Size of a checkpoint of all ranks, and of all that are there at once, on the file system of the run's folder."""
    one = plan.estimate.checkpoint_bytes
    if one is None:
        return None
    room = room_needed(plan, 0)
    keep = plan.config.checkpoint.keep
    swapped = {folder: size for folder, size in room.items() if folder}
    return {"bytes": one, "keep": keep, "kept_bytes": room[""], "at_once": room[""] // max(one, 1), "nvme": swapped}


def left_out(plan: Plan) -> list[str]:
    """What no figure of the plan holds."""
    memory = plan.estimate.memory
    lines = [] if memory is not None and memory.measured else list(NOT_MEASURED)
    if plan.estimate.not_measured is not None:
        lines[0] += f", which could not be measured: {' '.join(plan.estimate.not_measured.split())}"
    return lines + ([ON_CUDA] if plan.cluster.accelerator == "cuda" else []) + list(NEVER)


def advice(plan: Plan, unknown: bool) -> list[str]:
    """What the figures do not say by themselves."""
    lines = []
    if plan.world_size == 1:
        lines.append(
            "one rank: no stage saves memory of its device, as there is nobody to split with (stages 0 to 3 keep the "
            "same model state); offload=cpu does"
        )
    if unknown:
        lines.append("how much memory a rank has is not known, so nothing is judged: plan.memory_bytes=BYTES says it")
    return lines


def _told(candidate: Candidate) -> dict[str, Any]:
    return {"overrides": candidate.overrides, "refused": candidate.refused, "lacks": candidate.lacks}
