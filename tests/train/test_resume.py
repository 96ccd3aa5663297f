"""A run that is killed and resumed is the run that was not killed, bit for bit."""

from __future__ import annotations

import glob
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from launcher.rundir import RunDir, shared_memory_of
from tests.plan.test_recorded import of_an_earlier_release
from tests.train.running import (
    SMALL,
    Runs,
    kill_everything,
    last_step,
    launch,
    losses,
    processes_of,
    records,
    start,
    steps,
    wait_until,
)
from tests.train.test_parity import overrides

SETUPS = [("stage0", "none"), ("stage1", "none"), ("stage2", "none"), ("stage3", "none"), ("stage3", "cpu_all")]


def killed_after(runs: Runs, step: int, *options: str) -> Path:
    """Folder of a run whose every process got SIGKILL once `step` steps were logged."""
    run = runs.new()
    process = start(*SMALL, *options, f"run.dir={run}")
    wait_until(lambda: last_step(run) >= step or process.poll() is not None)
    kill_everything(run)
    process.wait()
    assert step <= last_step(run) < 20, "the run ended before it could be killed"
    return run


@pytest.mark.parametrize(("zero", "offload"), SETUPS)
def test_killed_and_resumed_equals_uninterrupted(runs: Runs, zero: str, offload: str) -> None:
    """huggingface/accelerate#1673: learning rates. huggingface/accelerate#4071: data order.

    vllm-project/speculators#739: the kill.
    """
    whole = runs.get(*overrides("true", zero, offload))
    options = (*overrides("true", zero, offload), "checkpoint.every=5", "checkpoint.keep=2")
    run = killed_after(runs, 11, *options)
    done = launch("recipe=resume", f"run.dir={run}")
    assert done.returncode == 0, done.stdout + done.stderr
    resumed_from = Path(json.loads((run / "plan.json").read_text())["resume_from"]).name
    assert resumed_from == "step_00000010"
    assert [record["step"] for record in steps(run)] == list(range(1, 21))
    assert losses(run) == losses(whole)
    assert [record["lr"] for record in steps(run)] == [record["lr"] for record in steps(whole)]
    assert [record["grad_norm"] for record in steps(run)] == [record["grad_norm"] for record in steps(whole)]
    assert records(run)[-1]["eval_loss"] == records(whole)[-1]["eval_loss"]
    dropped = (run / "history" / "0001" / "metrics_dropped.jsonl").read_text().splitlines()
    assert json.loads(dropped[0])["step"] == 11


def test_resume_goes_on_after_the_end_with_more_steps(runs: Runs) -> None:
    run = runs.new()
    assert launch(*SMALL, "run.steps=4", "schedule=constant", f"run.dir={run}").returncode == 0
    done = launch("recipe=resume", f"run.dir={run}", "run.steps=6", "checkpoint.keep=0")
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in steps(run)] == [1, 2, 3, 4, 5, 6]
    assert (run / "history" / "0001" / "plan.json").exists()
    assert sorted(path.name for path in (run / "checkpoints").glob("step_*")) == ["step_00000004", "step_00000006"]
    assert (run / "checkpoints" / "latest").read_text() == "step_00000006"


def test_a_run_of_an_earlier_release_goes_on_and_is_exported(runs: Runs, tmp_path: Path) -> None:
    run = runs.new()
    assert launch(*SMALL, "run.steps=4", "schedule=constant", f"run.dir={run}").returncode == 0
    of_an_earlier_release(RunDir(run))
    done = launch("recipe=export", f"run.dir={run}", f"export.dir={tmp_path / 'export'}")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "export" / "export.json").read_text())["verified"]["loss"] is not None
    (run / "summary.json").unlink()  # as after a kill of the launcher
    done = launch("recipe=resume", f"run.dir={run}", "run.steps=6")
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in steps(run)] == [1, 2, 3, 4, 5, 6]
    assert "ema" in json.loads((run / "plan.json").read_text())["config"]


def test_retention_keeps_the_newest_and_every_tenth_and_leaves_junk_alone(runs: Runs) -> None:
    """bghira/SimpleTuner#2989, huggingface/transformers#20988: by number, after the newer one stands, by one rank."""
    run = runs.new()
    options = ("run.steps=8", "schedule=constant", "checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_every=3")
    assert launch(*SMALL, *options, f"run.dir={run}").returncode == 0
    (run / "checkpoints" / "step_mine").mkdir()
    (run / "checkpoints" / "step_mine" / "notes.txt").write_text("keep me")
    assert launch("recipe=resume", f"run.dir={run}", "run.steps=12").returncode == 0
    kept = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    # 8 is the one that was resumed from
    assert kept == [f"step_{step:08d}" for step in (3, 6, 8, 9, 11, 12)] + ["step_mine"]


def test_resume_refuses_another_experiment_by_name(runs: Runs) -> None:
    run = runs.get(*overrides("true", "stage2", "none"))
    before = (run / "plan.json").read_text()
    done = launch(
        "recipe=resume", f"run.dir={run}", "run.steps=30", "run.seed=7", "model.config.hidden_size=32", "data=text"
    )
    assert done.returncode == 2
    for name in ("run.seed", "model.config.hidden_size", "data.kind"):
        assert name in done.stderr
    assert (run / "plan.json").read_text() == before


def test_resume_falls_back_past_a_broken_checkpoint_and_says_so(runs: Runs) -> None:
    """tdrussell/diffusion-pipe#159: a newest checkpoint that is there and not whole."""
    run = runs.new()
    options = ("run.steps=4", "schedule=constant", "checkpoint.every=2", "checkpoint.keep=0")
    assert launch(*SMALL, *options, f"run.dir={run}").returncode == 0
    shard = next((run / "checkpoints" / "step_00000004").glob("*optim_states.pt"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    done = launch("recipe=resume", f"run.dir={run}", "run.steps=5")
    assert done.returncode == 0, done.stderr
    assert "passed over step_00000004" in done.stderr and shard.name in done.stderr
    assert [record["step"] for record in steps(run)] == [1, 2, 3, 4, 5]


def test_resume_without_any_checkpoint_never_starts_from_scratch(runs: Runs, tmp_path: Path) -> None:
    source = runs.get(*overrides("true", "stage2", "none"))
    run = tmp_path / "copy"
    run.mkdir()
    for name in ("plan.json", "config.yaml", "overrides.txt"):
        (run / name).write_text((source / name).read_text())
    (run / "checkpoints" / "step_00000020").mkdir(parents=True)
    done = launch("recipe=resume", f"run.dir={run}", "run.steps=30")
    assert done.returncode == 2
    assert "no whole checkpoint" in done.stderr and "step_00000020" in done.stderr
    assert not (run / "metrics.jsonl").exists()


def test_no_process_and_no_shared_memory_is_left_behind(runs: Runs) -> None:
    """DeepSpeed's CPU operator leaves 69 MB a rank in /dev/shm; a run that ended, however, leaves none."""
    run = runs.new()
    assert launch(*SMALL, "run.steps=1", "cluster.master_port=29871", f"run.dir={run}").returncode == 0
    assert not list(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*_29871_*"))
    assert not processes_of(run)


def test_a_run_at_work_is_refused_and_what_outlived_its_launcher_is_ended(runs: Runs) -> None:
    """Two attempts in one folder lose each other's records: the ranks of the first are stopped, and cannot leave."""
    whole = runs.get(*overrides("true", "stage2", "none"))
    run = runs.new()
    process = start(*SMALL, *overrides("true", "stage2", "none"), f"run.dir={run}")
    wait_until(lambda: last_step(run) >= 3 or process.poll() is not None)
    ranks = [json.loads((run / "control" / f"pid.rank{rank}.json").read_text())["pid"] for rank in (0, 1)]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    before = {path: path.read_bytes() for path in (run / "plan.json", run / "metrics.jsonl")}
    done = launch("recipe=resume", f"run.dir={run}")
    assert done.returncode == 2 and f"its launcher is at work (process {process.pid} " in done.stderr
    assert {path: path.read_bytes() for path in before} == before
    port = json.loads((run / "control" / "rendezvous.json").read_text())["MASTER_PORT"]
    assert glob.glob(shared_memory_of(port))
    process.kill()
    process.wait()
    left = processes_of(run)
    assert set(ranks) < {part.pid for part in left}
    done = launch("recipe=resume", f"run.dir={run}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(run) == losses(whole) and len(losses(run)) == 20
    assert not any(part.is_running() and part.status() != psutil.STATUS_ZOMBIE for part in left)
    assert not glob.glob(shared_memory_of(port))


def test_resume_refuses_a_layout_that_a_checkpoint_cannot_take_by_name(runs: Runs, tmp_path: Path) -> None:
    run = runs.get(*overrides("true", "stage2", "none"))
    nvme = f"deepspeed.zero_optimization.offload_optimizer.nvme_path={tmp_path}"
    done = launch("recipe=resume", f"run.dir={run}", "run.steps=30", "zero=stage3", "offload=nvme", nvme)
    assert done.returncode == 2
    assert "ZeRO stage 3, the checkpoint has 2" in done.stderr
    assert "optimizer offload nvme, the checkpoint has None" in done.stderr
    assert "state in swap files fits only the ranks that wrote them" in done.stderr


def test_resume_of_a_finished_run_says_that_nothing_is_left(runs: Runs) -> None:
    run = runs.get(*overrides("true", "stage2", "none"))
    done = launch("recipe=resume", f"run.dir={run}")
    assert done.returncode == 2
    assert "already at step 20" in done.stderr and "run.steps=40" in done.stderr
