"""Under a real Slurm: inside an allocation, and as a batch job that is preempted, requeued and goes on.

Run by pytest; skips with the reason where Slurm's daemons cannot be started.
Must never use another Slurm than the one it starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import slurm
from tests.train.running import ROOT, SMALL, last_step, losses, steps, wait_until

pytestmark = pytest.mark.cluster
OPTIONS = [option for option in SMALL if not option.startswith("cluster.num_procs")]
LAUNCH = [sys.executable, str(ROOT / "launch.py")]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables with which Slurm's commands reach a Slurm of this machine."""
    if reason := slurm.why_unavailable():
        pytest.skip(reason)
    with slurm.running(tmp_path_factory.mktemp("slurm")) as env:
        yield env | {"OMP_NUM_THREADS": "1"}


def test_inside_an_allocation_the_ranks_are_slurms(environment: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [*OPTIONS, "cluster=slurm", "run.steps=4", "schedule=constant", "zero=stage3", f"run.dir={run}"]
    done = subprocess.run(
        ["salloc", "--quiet", "--nodes=1", "--ntasks-per-node=2", *LAUNCH, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    log = run / "logs" / "launcher.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    assert len(losses(run)) == 4
    assert json.loads((run / "effective.json").read_text())["world_size"] == 2
    assert sorted(path.name for path in (run / "logs").glob("*.rank*.log")) == [
        f"{os.uname().nodename}.rank{rank}.log" for rank in (0, 1)
    ]


def test_a_batch_job_goes_on_after_it_was_requeued(environment: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    batch = ["launch.submit=sbatch", "launch.nodes=1", "launch.slots=2", "watch.grace_s=30"]
    options = ["run.steps=60", "schedule=constant", "eval.samples=0", "checkpoint.every=20", "checkpoint.keep=0"]
    done = subprocess.run(
        [*LAUNCH, *OPTIONS, "cluster=slurm", *batch, *options, f"run.dir={run}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[2].rstrip(":")
    wait_until(lambda: last_step(run) >= 5)
    subprocess.run(["scancel", "--batch", "--signal=TERM", job], env=environment, check=True)
    output = Path(f"{run}.slurm-{job}.log")
    wait_until(lambda: (run / "summary.json").exists())
    now = ["scontrol", "update", f"JobId={job}", "StartTime=now"]  # Slurm lets a requeued job wait two minutes
    state = ["squeue", "--noheader", "--format=%T", f"--jobs={job}"]
    wait_until(lambda: subprocess.check_output(state, env=environment, text=True).strip() == "PENDING")
    time.sleep(3)  # slurmd refuses a job whose start has the second in which it was killed

    def started_again() -> bool:
        subprocess.run(now, env=environment, capture_output=True, check=False)
        time.sleep(0.5)
        return (run / "history" / "0001").exists()

    wait_until(started_again, 300)  # its scheduler looks once a minute
    wait_until(lambda: last_step(run) == 60 and (run / "summary.json").exists(), 120)
    assert [record["step"] for record in steps(run)] == list(range(1, 61)), output.read_text()
    first = json.loads((run / "history" / "0001" / "summary.json").read_text())
    assert first["exit_code"] == 143 and 5 <= first["steps"] < 60
    assert Path(json.loads((run / "plan.json").read_text())["resume_from"]).name == f"step_{first['steps']:08d}"
