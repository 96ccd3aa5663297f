"""Signals end a run with a checkpoint; a rank that dies ends it with its name; nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.train.running import ROOT, SMALL, Runs, last_step, launch, processes_of, start, steps, wait_until

LONG = (*SMALL, "run.steps=100000", "eval.every=0", "checkpoint.every=0")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_ends_with_a_checkpoint(runs: Runs, number: int, code: int) -> None:
    run = runs.new()
    process = start(*LONG, f"run.dir={run}")
    wait_until(lambda: last_step(run) >= 2 or process.poll() is not None)
    request = run / "control" / "measure"  # as the launcher asks when steps become slow
    request.write_text("")
    wait_until(lambda: not request.exists())
    time.sleep(1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, out + err
    assert "every rank computes as fast" in out or "slow to compute: " in out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "stopped" and summary["exit_code"] == code
    assert summary["steps"] == last_step(run) == int((run / "checkpoints" / "latest").read_text().removeprefix("step_"))
    assert "recipe=resume" in out
    wait_until(lambda: not processes_of(run), 10)


def test_sigterm_to_everything_but_the_launcher_is_a_preemption(runs: Runs) -> None:
    """KempnerInstitute/KempnerForge#177: a signal to the whole group lost the emergency checkpoint."""
    run = runs.new()
    process = start(*LONG, f"run.dir={run}")
    wait_until(lambda: last_step(run) >= 2 or process.poll() is not None)
    for part in processes_of(run):
        if part.pid != process.pid:
            part.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, out + err
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "stopped" and summary["steps"] == last_step(run)
    assert (run / "checkpoints" / "latest").read_text() == f"step_{summary['steps']:08d}"


def test_a_killed_rank_is_named_and_the_rest_ends(runs: Runs) -> None:
    """deepspeedai/DeepSpeed#618: the launcher left with 0, or with 247."""
    run = runs.new()
    process = start(*LONG, f"run.dir={run}")
    wait_until(lambda: last_step(run) >= 2 or process.poll() is not None)
    os.kill(json.loads((run / "control" / "pid.rank1.json").read_text())["pid"], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 5, out + err
    failure = json.loads((run / "summary.json").read_text())["failure"]
    assert failure["rank"] == 1 and "killed" in failure["message"]
    assert failure["log"].endswith(".rank1.log") and failure["log"] in err
    wait_until(lambda: not processes_of(run), 10)


def test_a_worker_that_raises_is_named_with_its_last_lines_and_log(runs: Runs) -> None:
    run = runs.new()
    done = launch(*SMALL, "run.steps=3", "model.config.hidden_act=no_such_function", f"run.dir={run}")
    assert done.returncode == 5, done.stdout + done.stderr
    failure = json.loads((run / "summary.json").read_text())["failure"]
    assert failure["rank"] in (0, 1)
    assert failure["log"] in done.stderr and "  | " in done.stderr
    assert "Error" in Path(failure["log"]).read_text()
    assert not (run / "checkpoints" / "latest").exists()
    assert not processes_of(run)


def test_a_run_that_does_not_learn_is_stopped_with_the_diagnosis(runs: Runs, tmp_path: Path) -> None:
    """One letter over and over and a learning rate of 0: every loss is the same to the last bit."""
    (tmp_path / "flat.txt").write_text("a" * 100_000)
    run = runs.new()
    data = (f"data.files=[{tmp_path / 'flat.txt'}]", f"data.cache_dir={tmp_path / 'cache'}")
    still = ("schedule=constant", "deepspeed.optimizer.params.lr=0.0", "run.steps=100", "eval.samples=0")
    done = launch(*SMALL, "data=text", *data, *still, f"run.dir={run}")
    assert done.returncode == 5, done.stdout + done.stderr
    assert "the same to the last bit" in done.stderr
    assert len(steps(run)) == 11 and not (run / "checkpoints" / "latest").exists()


def test_every_rank_has_its_own_log_with_the_host_in_its_name(runs: Runs) -> None:
    run = runs.get("run.steps=2", "schedule=constant")
    names = sorted(path.name for path in (run / "logs").iterdir())
    assert names == sorted(["launcher.log", f"{os.uname().nodename}.rank0.log", f"{os.uname().nodename}.rank1.log"])


def test_an_edited_plan_is_refused_by_the_workers(runs: Runs, tmp_path: Path) -> None:
    import subprocess

    plan = json.loads((runs.get("run.steps=2", "schedule=constant") / "plan.json").read_text())
    plan["batch"]["micro_batch_size"] = 1
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "worker.py"), str(tmp_path / "plan.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "it was edited" in done.stderr


def test_metrics_hold_the_fields_of_the_contract(runs: Runs) -> None:
    record = steps(runs.get("run.steps=2", "schedule=constant"))[-1]
    assert set(record) == {
        *("step", "loss", "lr", "grad_norm", "step_s", "tokens_per_s", "samples_seen", "peak_bytes"),
    }
