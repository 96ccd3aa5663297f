"""Bytes of a step's collectives as predicted, over those that DeepSpeed's own logger counts, on two CPU ranks.

`scripts/bench traffic [accumulation=2] [overrides]`; within the ranks counts `benches.traffic_rank`. No times.
Must never leave a collective out: a row is all of them, of forward, backward and update.
"""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path

from benches.group import ask_plan, ask_ranks
from benches.report import Row
from benches.request import BenchError, Request, with_defaults
from benches.timing import base_environment
from launcher.plan import Plan

OPTIONS = {"accumulation": 2}
TOLERANCE = 0.02
PHASES = ("forward", "backward", "update")
ZERO = "deepspeed.zero_optimization"
# Far apart and few at once, as parameters of a model of billions are under DeepSpeed's own limits.
LARGE = (f"{ZERO}.stage3_max_reuse_distance=100000", f"{ZERO}.stage3_prefetch_bucket_size=50000")
WORDS = ["schedule=constant", "cluster.accelerator=cpu", "cluster.num_procs=2", "train.sequence_length=16"]
WORDS += ["train.micro_batch_size=1", "eval.samples=0"]


def run(request: Request) -> list[Row]:
    """One row per stage, offload, precision and accumulation: predicted over counted bytes of a step."""
    if request.options["accumulation"] < 2:
        raise BenchError("accumulation is at least 2; one micro-batch is measured beside it")
    rows = []
    for name, words in combinations(request.options["accumulation"]).items():
        with tempfile.TemporaryDirectory(prefix="zerolaunch-bench-") as folder:
            given = with_defaults([*WORDS, *words, f"run.dir={folder}/run"], request.overrides)
            plan = ask_plan(given, base_environment())
            counted = ask_ranks(plan, "benches.traffic_rank", {}, Path(folder))[0]
        rows.append(row_of(name, plan, counted))
    return rows


def combinations(accumulation: int) -> dict[str, tuple[str, ...]]:
    """{row: overrides}: stages 0 to 3, each offload they take, fp32 and bf16, one and more micro-batches."""
    found = {}
    for stage, offload, kind, passes in product(
        range(4), ("none", "cpu", "cpu_all"), ("fp32", "bf16"), (1, accumulation)
    ):
        if stage < {"none": 0, "cpu": 1, "cpu_all": 3}[offload] or (stage == 0 and kind != "fp32"):
            continue
        words = (f"zero=stage{stage}", f"offload={offload}", f"precision={kind}")
        name = f"stage {stage}, offload {offload}, {kind}, {passes} micro-batches"
        found[name] = (*words, f"train.gradient_accumulation_steps={passes}", *(LARGE if stage == 3 else ()))
    return found


def row_of(name: str, plan: Plan, counted: dict[str, dict[str, int]]) -> Row:
    """Predicted over counted, all collectives together, with each phase's bytes as parts."""
    parts: dict[str, list[float]] = {}
    for phase in PHASES:
        ours = sum(move.logged_bytes for move in plan.estimate.collectives if move.phase == phase)
        parts[f"{phase}, predicted, bytes"] = [float(ours)]
        parts[f"{phase}, counted, bytes"] = [float(sum(counted[phase].values()))]
    predicted, real = (
        sum(parts[f"{phase}, {kind}, bytes"][0] for phase in PHASES) for kind in ("predicted", "counted")
    )
    if not real:
        raise BenchError(f"{name}: DeepSpeed's logger counted nothing")
    bounds = {"at_least": 1 - TOLERANCE, "at_most": 1 + TOLERANCE}
    return Row(f"predicted over counted bytes: {name}", "ratio", [predicted / real], parts=parts, **bounds)
