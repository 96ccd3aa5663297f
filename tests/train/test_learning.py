"""The default run learns: its validation loss ends below what byte frequencies alone can reach."""

from __future__ import annotations

import json
from pathlib import Path

from tests.train.running import launch, records


def test_default_run_beats_the_unigram_entropy_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = launch("zero=stage3", "offload=cpu", f"run.dir={run}", "cluster.accelerator=cpu", "cluster.num_procs=2")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run / "summary.json").read_text())
    evaluations = [record["eval_loss"] for record in records(run) if "eval_loss" in record]
    assert summary["final_eval_loss"] == evaluations[-1] < summary["unigram_entropy"]
    assert 3.0 < summary["unigram_entropy"] < 3.5  # nats per byte of Python sources
    assert f"{summary['final_eval_loss']:.4f}" in done.stdout
    assert f"{summary['unigram_entropy']:.4f}" in done.stdout
    for next_command in ("recipe=resume", "recipe=export", "mode=plan"):
        assert next_command in done.stdout
    assert Path(summary["checkpoint"]).is_dir()
