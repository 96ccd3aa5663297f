"""What a run of recipe=profile measured -> the numbers that later plans take in the place of assumptions.

Called by `launcher.profiled` when the run has ended. Pure.
Must never give a number that was not measured, or that the run was too small to tell.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from launcher.plan import Plan
from launcher.planner.hardware import KNOWN, VERSION
from launcher.planner.movement import movement_of, outlined
from launcher.planner.setup import Setup
from launcher.planner.timing import peak_name

TOLD_BY = 0.1  # share of a GPU's memory from which on a run tells how much of it goes to fragments
LEAST, MOST = 1e-6, 1e6  # of the utilisation that is looked for
HALVINGS = 28  # to a millionth; each walks through a step


def correction(plan: Plan, result: dict[str, Any], date: str) -> dict[str, Any]:
    """hardware.json: the numbers by their options' names, and what they were measured with.

    `result`: control/result.json of the run. Numbers that it does not tell are absent.
    """
    measured = result["hardware"]
    tokens = plan.batch.global_batch_size * plan.config.train.sequence_length
    step_s = tokens / result["tokens_per_s"] if result.get("tokens_per_s") else None
    numbers = {name: value for name, value in measured.items() if name in KNOWN and value is not None}
    fragmented = fragmentation(measured)
    if fragmented is not None:
        numbers["fragmentation"] = fragmented
    numbers |= computing(plan, numbers, step_s)
    rest = {name: value for name, value in measured.items() if name not in KNOWN and value is not None}
    memory = plan.estimate.memory
    planned = {} if memory is None else {moment.name: moment.total_bytes for moment in memory.moments}
    return {
        **{"version": VERSION, "measured_by": "recipe=profile", "date": date},
        **{"model": plan.config.model.name, "precision": plan.precision, "stage": plan.zero_stage},
        **{"micro_batch_size": plan.batch.micro_batch_size, "sequence_length": plan.config.train.sequence_length},
        **{"step_s": step_s, "tokens_per_s": result.get("tokens_per_s"), "planned_moments": planned},
        **rest,
        **numbers,
    }


def fragmentation(measured: dict[str, Any]) -> float | None:
    """Share of what torch reserved on a GPU that it never had allocated; None where little of the GPU was used."""
    total, allocated, reserved = (measured.get(name) for name in ("memory_bytes", "allocated_bytes", "reserved_bytes"))
    if not (total and allocated and reserved) or allocated < TOLD_BY * total:
        return None
    return float(max(0, reserved - allocated) / reserved)


def computing(plan: Plan, numbers: dict[str, Any], step_s: float | None) -> dict[str, float]:
    """`utilisation`: the share of its peak at which computing, beside all else that a plan estimates, takes `step_s`.

    So that the plan of the same run estimates the time that it took. A step that computed faster than the product of
    two matrices that was measured (bf16 on a CPU without its instructions may) has shown a higher peak: then that too.
    Nothing where a plan would estimate no time.
    """
    if step_s is None or plan.estimate.parameters is None:
        return {}
    only: dict[str, Any] = {"file": None} | dict.fromkeys(KNOWN) | numbers
    section = dataclasses.replace(plan.config.hardware, **only)
    setup = Setup.of(plan.config, plan.deepspeed, plan.cluster)
    profile = outlined(plan.estimate.parameters, plan.config)

    def planned_s(share: float) -> float | None:
        config = dataclasses.replace(plan.config, hardware=dataclasses.replace(section, utilisation=share))
        time = movement_of(profile, setup, config, plan.batch).time
        return None if time is None else time.step_s

    at_peak, without = planned_s(1.0), planned_s(MOST)
    if at_peak is None or without is None:
        return {}
    if without > step_s:  # it is not computing that was faster than it was measured
        return {"utilisation": 1.0}
    low, high = (LEAST, 1.0) if at_peak <= step_s else (1.0, MOST)
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if (planned_s(middle) or 0.0) > step_s else (low, middle)
    if high <= 1.0:
        return {"utilisation": high}
    return {"utilisation": 1.0, peak_name(setup): numbers[peak_name(setup)] * high}
