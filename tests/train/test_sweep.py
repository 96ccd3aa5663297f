"""A sweep: every trial in fresh processes and its own folder; one that fails is recorded and the rest goes on."""

from __future__ import annotations

import json

from tests.train.running import SMALL, Runs, launch, losses


def test_a_sweep_records_a_failing_trial_and_goes_on(runs: Runs) -> None:
    """wandb/wandb#7811: the sweep is outside, and no trial shares a process with another."""
    folder = runs.new()
    done = launch(
        "--multirun",
        *SMALL,
        "run.steps=3",
        "schedule=constant",
        "model.config.hidden_act=no_such_function,gelu",
        f"run.dir={folder}",
    )
    assert done.returncode == 5, done.stdout + done.stderr
    summaries = [json.loads((folder / str(number) / "summary.json").read_text()) for number in (0, 1)]
    assert [summary["exit_code"] for summary in summaries] == [5, 0]
    assert len(losses(folder / "1")) == 3
    pids = [
        json.loads((folder / str(number) / "control" / f"pid.rank{rank}.json").read_text())["pid"]
        for number in (0, 1)
        for rank in (0, 1)
    ]
    assert len(set(pids)) == 4
    table = done.stdout[done.stdout.index("sweep") :]
    assert "hidden_act=no_such_function" in table and "hidden_act=gelu" in table
    assert f"{summaries[1]['final_eval_loss']:.4f}" in table
