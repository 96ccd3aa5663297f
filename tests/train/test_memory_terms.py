"""After training a rank holds what was planned, term by term, at every stage and with every offload.

Run by pytest: the recipe as workers run it, in ranks that the engine server forks; figures are read off result.json.
Must never take a planned figure from the code that measures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.plan import Plan, build_plan
from launcher.planner import surprise
from tests.plan.asking import composed
from tests.train.engines import Engines
from tests.train.test_memory_peaks import plan_of

MODEL = (
    *("model.config.hidden_size=48", "model.config.intermediate_size=72", "model.config.num_hidden_layers=2"),
    *("model.config.tie_word_embeddings=false", "train.sequence_length=32", "train.micro_batch_size=2"),
    *("cluster.num_procs=2", "eval.samples=8", "schedule=constant", "run.steps=2"),
)
BUCKET = "deepspeed.zero_optimization.reduce_bucket_size=10000"
TWICE = "train.gradient_accumulation_steps=2"
ONCE = "train.gradient_accumulation_steps=1"
CASES: dict[str, tuple[str, ...]] = {
    "stage 0": ("zero=stage0", ONCE),
    "stage 1": ("zero=stage1", ONCE),
    "stage 1, bf16, twice": ("zero=stage1", "precision=bf16", TWICE, BUCKET),
    "stage 1, offloaded": ("zero=stage1", "offload=cpu", ONCE),
    "stage 2": ("zero=stage2", ONCE),
    "stage 2, bf16": ("zero=stage2", "precision=bf16", ONCE),
    "stage 2, offloaded": ("zero=stage2", "offload=cpu", ONCE),
    "stage 2, offloaded, bf16, twice": ("zero=stage2", "offload=cpu", "precision=bf16", TWICE),
    "stage 2, averaged": ("zero=stage2", "ema.decay=0.9", ONCE),
    "stage 3": ("zero=stage3", BUCKET, ONCE),
    "stage 3, bf16": ("zero=stage3", "precision=bf16", BUCKET, ONCE),
    "stage 3, nothing persists": (
        *("zero=stage3", BUCKET, ONCE),
        "deepspeed.zero_optimization.stage3_param_persistence_threshold=0",
    ),
    "stage 3, offloaded": ("zero=stage3", "offload=cpu", BUCKET, ONCE),
    "stage 3, everything offloaded, bf16": ("zero=stage3", "offload=cpu_all", "precision=bf16", BUCKET, TWICE),
    "stage 3, an adapter": (*("zero=stage3", BUCKET, ONCE), "peft=lora", "peft.rank=4", "peft.target=[q_proj,v_proj]"),
}


def held(engines: Engines, plan: Plan, run: Path) -> dict[str, Any]:
    """The terms that rank 0 held at the end of a run of `plan`."""
    engines.run_recipe(plan, run)
    return dict(json.loads((run / "control" / "result.json").read_text())["memory"]["terms"])


@pytest.mark.parametrize("name", CASES)
def test_every_term_is_held_as_planned(engines: Engines, tmp_path: Path, name: str) -> None:
    words = CASES[name]
    plan = plan_of(*MODEL, *words)
    memory = plan.estimate.memory
    assert memory is not None and memory.measured
    assert held(engines, plan, tmp_path / "run") == memory.resident


def test_memory_shows_which_stage_is_really_in_force(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configured is not running: what a run at stage 0 holds, beside the plan of one at stage 3."""
    monkeypatch.setattr(surprise, "FLOOR_BYTES", 0)  # the model is tiny
    running = build_plan(composed(*MODEL, "zero=stage0", ONCE), {})
    configured = build_plan(composed(*MODEL, "zero=stage3", BUCKET, ONCE), {}).estimate.memory
    assert configured is not None
    measured = {"terms": held(engines, running, tmp_path / "run")}
    texts = surprise.compared(configured, surprise.Setting(3, 2), True, measured)["surprises"]
    told = {text.partition(":")[0]: text for text in texts}
    assert "whole where they should be split over 2 ranks, so stage 3 is not in force" in told["weights"]
    assert "whole where it should be split over 2 ranks, so stage 3 is not in force" in told["moments"]
