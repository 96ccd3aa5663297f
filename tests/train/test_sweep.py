"""A sweep: every trial in fresh processes and its own folder; one that fails is recorded and the rest goes on."""

from __future__ import annotations

import json

from tests.train.running import SMALL, Runs, launch, losses


def test_a_sweep_records_a_failing_trial_and_goes_on(runs: Runs) -> None:
    folder = runs.new()
    done = launch(
        "--multirun",
        *SMALL,
        "run.steps=3",
        "schedule=constant",
        "model.config.num_attention_heads=3,4",
        "model.config.num_key_value_heads=${model.config.num_attention_heads}",
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
    assert "num_attention_heads=3" in table and "num_attention_heads=4" in table
    assert f"{summaries[1]['final_eval_loss']:.4f}" in table
