"""W&B: one run on global rank 0, continued on resume; a tracker that fails or hangs never stops training."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.train.running import SMALL, Runs, launch, steps

SHORT = (*SMALL, "run.steps=3", "schedule=constant", "eval.samples=0", "tracker=wandb")


def environment(**extra: str) -> dict[str, str]:
    """Without any W&B settings of whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return (
        kept
        | {"HOME": "/nonexistent-home", "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
        | extra
    )


def test_one_run_that_a_resume_continues_without_a_key(runs: Runs) -> None:
    """Offline on request here: a key would make it talk to a server. No planted secret reaches the run folder.

    wandb/wandb#8428, Red-Hat-AI-Innovation-Team/mini_trainer#38: two ranks, one run. wandb/wandb#9449: the step is a
    metric of its own. huggingface/finetrainers#188: a resume continues the run; what trains otherwise is a new one.
    """
    run, secret = runs.new(), "planted-secret-4711"
    planted = dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"), secret)
    done = launch(*SHORT, f"run.dir={run}", env=environment(WANDB_MODE="offline", **planted))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [path for path in run.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    summary = json.loads((run / "summary.json").read_text())
    (folder,) = (run / "wandb").glob("offline-run-*")
    assert folder.name.endswith(summary["tracker_run_id"])
    assert summary["tracker_sync"] == f"wandb sync {folder}" and summary["tracker_sync"] in done.stdout
    assert (
        json.loads((run / "checkpoints" / "step_00000003" / "manifest.json").read_text())["tracker_run_id"]
        == (summary["tracker_run_id"])
    )
    data = next(folder.glob("*.wandb")).read_bytes()
    assert b"tokens_per_s" in data and b"grad_norm" in data
    again = launch("recipe=resume", f"run.dir={run}", "run.steps=5", env=environment())
    assert again.returncode == 0, again.stderr
    assert json.loads((run / "summary.json").read_text())["tracker_run_id"] == summary["tracker_run_id"]
    assert all(path.name.endswith(summary["tracker_run_id"]) for path in (run / "wandb").glob("offline-run-*"))
    changed = launch(
        "recipe=resume", f"run.dir={run}", "run.steps=6", "deepspeed.optimizer.params.lr=1e-4", env=environment()
    )
    assert changed.returncode == 0, changed.stderr
    child = json.loads((run / "summary.json").read_text())["tracker_run_id"]
    assert child != summary["tracker_run_id"]
    (folder,) = (run / "wandb").glob(f"offline-run-*-{child}")
    data = next(folder.glob("*.wandb")).read_bytes()
    assert b"parent_run_id" in data and summary["tracker_run_id"].encode() in data


@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        ("raises", "def init(**options):\n    raise RuntimeError('no tracker today')\n"),
        ("hangs", "import time\ndef init(**options):\n    time.sleep(600)\n"),
    ],
)
def test_a_tracker_in_trouble_never_stops_training(runs: Runs, tmp_path: Path, trouble: str, code: str) -> None:
    """starVLA/starVLA#369, with a stand-in `wandb` ahead of the real one: the log says what happened."""
    (tmp_path / "wandb.py").write_text(code + "class Settings:\n    def __init__(self, **options): pass\n")
    run = runs.new()
    done = launch(
        *SHORT, "tracker.timeout_s=2", f"run.dir={run}", env=environment(PYTHONPATH=str(tmp_path)), timeout_s=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record["step"] for record in steps(run)] == [1, 2, 3]
    log = next((run / "logs").glob("*.rank0.log")).read_text()
    assert ("no tracker today" if trouble == "raises" else "gave up after 2.0 s") in log
