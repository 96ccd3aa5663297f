"""The best evaluation: when a run ends for want of a better one, and that its checkpoint is kept and exported.

Run by pytest: recipes as workers run them, in ranks that the engine server forks.
Must never read an outcome off the log.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from launcher.errors import UserError
from launcher.rundir import RunDir
from recipes.shared.best import Best
from recipes.shared.checkpoint import find, manifest
from tests.plan.asking import planned
from tests.train.engines import Engines

# The first evaluation stays the best: none is better by five nats.
REQUEST = (
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=1",
    "train.sequence_length=32",
    "train.global_batch_size=4",
    "cluster.num_procs=2",
    "eval.samples=8",
    "eval.every=1",
    "run.steps=12",
    "schedule=constant",
    "eval.min_delta=5.0",
    "checkpoint.every=4",
    "checkpoint.keep=1",
    "checkpoint.best=true",
)


def evaluations(run: Path) -> dict[int, float]:
    """{step: eval_loss} of a run's metrics."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["eval_loss"] for record in records if "eval_loss" in record}


def result(run: Path) -> dict[str, object]:
    """What the run says of itself."""
    found: dict[str, object] = json.loads((run / "control" / "result.json").read_text())
    return found


def test_an_evaluation_is_better_only_by_more_than_the_least_gain() -> None:
    best = Best()
    seen = [best.see(loss, step, 0.1) for step, loss in enumerate([3.0, 2.95, 2.85, 2.9, 2.8], 1)]
    assert seen == [True, False, True, False, False]
    assert best == Best(2.85, 3, since=2)
    assert not best.see(2.0, 3, 0.1), "an evaluation that is made again after a resume"
    assert not best.see(None, 6, 0.1) and best.since == 2


def test_a_run_ends_when_no_evaluation_is_better_and_keeps_the_best(engines: Engines, tmp_path: Path) -> None:
    """talmolab/sleap-nn#471: every rank leaves at the same step, or this run would hang."""
    engines.run_recipe(planned(*REQUEST, "eval.patience=2"), tmp_path)
    found = evaluations(tmp_path)
    assert sorted(found) == [1, 2, 3]
    told = result(tmp_path)
    assert told["ended_early"] is True and told["stopped"] is False and told["steps"] == 3
    assert told["best"] == {"eval_loss": found[1], "step": 1, "since": 2}
    folders = {folder.name for folder in manifest.steps(RunDir(tmp_path).checkpoints)}
    assert folders == {"step_00000001", "step_00000003"}
    assert find.best_of(RunDir(tmp_path)).name == "step_00000001"


def test_a_resumed_run_still_knows_the_best(engines: Engines, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    engines.run_recipe(planned(*REQUEST, "eval.patience=2"), whole)
    last = find.newest(RunDir(whole))
    plan = planned(*REQUEST, "eval.patience=4")
    engines.run_recipe(dataclasses.replace(plan, resume_from=str(last)), resumed)
    assert sorted(evaluations(resumed)) == [4, 5]
    assert result(resumed)["best"] == {"eval_loss": evaluations(whole)[1], "step": 1, "since": 4}


def test_a_best_checkpoint_that_was_not_kept_is_not_replaced_by_another(engines: Engines, tmp_path: Path) -> None:
    options = [option for option in REQUEST if "checkpoint" not in option]
    engines.run_recipe(planned(*options, "eval.patience=2", "checkpoint.every=0"), tmp_path)
    with pytest.raises(UserError, match="was the best, and was not kept"):
        find.best_of(RunDir(tmp_path))
