"""Losses and insults on two real SSH hosts: every one ends with its name, the right exit code and no process left.

Run by pytest; each test starts the product on the first host, as a user would, with a run folder both hosts share.
Must never leave a run behind: `processes_of` looks on the whole machine, which is both hosts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.train.running import ROOT, SMALL, last_step, losses, processes_of, steps, wait_until

pytestmark = pytest.mark.cluster
OPTIONS = [option for option in SMALL if not option.startswith("cluster.num_procs")]
LONG = ("run.steps=100000", "eval.every=0", "eval.samples=0", "checkpoint.every=5", "schedule=constant", "zero=stage2")
NO_ORPHAN_S = 15


@pytest.fixture
def hostfile(two_hosts: Hosts, tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("".join(f"{name} slots=1\n" for name in two_hosts.names))
    return path


@contextmanager
def started(hosts: Hosts, hostfile: Path, run: Path, *overrides: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """The product on the first host, with the run at its third step or ended."""
    argv = [sys.executable, str(ROOT / "launch.py"), "cluster=hostfile", f"cluster.hostfile={hostfile}"]
    process = hosts.popen(
        hosts.names[0],
        [*argv, *OPTIONS, *overrides, f"run.dir='{run}'"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
    )
    try:
        wait_until(lambda: last_step(run) >= 3 or process.poll() is not None)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        for left in processes_of(run):
            left.kill()


def ended(process: subprocess.Popen[str], run: Path, within_s: float = 60) -> tuple[int, str]:
    """Exit code and stderr of the launcher; nothing of the run is left NO_ORPHAN_S later."""
    _, err = process.communicate(timeout=within_s)
    wait_until(lambda: not processes_of(run), NO_ORPHAN_S)
    return process.returncode, err


def pid_of(run: Path, rank: int) -> int:
    return int(json.loads((run / "control" / f"pid.rank{rank}.json").read_text())["pid"])


def failure_of(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "summary.json").read_text())["failure"])


def test_sigterm_leaves_a_checkpoint_and_no_process(two_hosts: Hosts, hostfile: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(two_hosts, hostfile, run, *LONG) as process:
        process.send_signal(signal.SIGTERM)
        code, err = ended(process, run)
    assert code == 143, err
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "stopped" and summary["steps"] == last_step(run)
    manifest = json.loads((run / "checkpoints" / f"step_{summary['steps']:08d}" / "manifest.json").read_text())
    assert manifest["world_size"] == 2 and manifest["step"] == summary["steps"]


def test_a_killed_rank_is_named_and_a_restart_goes_on(two_hosts: Hosts, hostfile: Path, tmp_path: Path) -> None:
    """From the newest checkpoint, with the losses of the steps that had been taken already."""
    run = tmp_path / "run"
    options = (*LONG[1:], "run.steps=40", "cluster.restarts=1", "checkpoint.keep=0")
    with started(two_hosts, hostfile, run, *options) as process:
        wait_until(lambda: last_step(run) >= 8 or process.poll() is not None)
        before = losses(run)[:8]
        os.kill(pid_of(run, 1), signal.SIGKILL)
        code, err = ended(process, run, 120)
    assert code == 0, err
    assert f"rank 1 on {two_hosts.names[1]} was killed" in err
    assert [record["step"] for record in steps(run)] == list(range(1, 41))
    assert losses(run)[:8] == before
    first = json.loads((run / "history" / "0001" / "summary.json").read_text())
    assert first["exit_code"] == 5 and first["failure"]["rank"] == 1 and first["failure"]["kind"] == "killed"
    assert json.loads((run / "summary.json").read_text())["attempt"] == 2


def test_a_host_that_loses_all_its_processes_ends_the_run(two_hosts: Hosts, hostfile: Path, tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed#1995: the other host's processes survived."""
    run, second = tmp_path / "run", two_hosts.names[1]
    with started(two_hosts, hostfile, run, *LONG) as process:
        for pid in two_hosts.pids(second):
            os.kill(pid, signal.SIGKILL)
        code, err = ended(process, run)
    assert code == 5, err
    assert failure_of(run)["host"] == second and failure_of(run)["kind"] == "killed"


def test_a_lost_host_is_left_out_and_the_run_goes_on_without_it(
    two_hosts: Hosts, hostfile: Path, tmp_path: Path
) -> None:
    """On half the ranks, with the same global batch: the losses stay those of the steps taken before."""
    run, (first, second) = tmp_path / "run", two_hosts.names
    options = (*LONG[1:], "run.steps=30", "cluster.restarts=1", "checkpoint.keep=0", "watch.stall_s=6")
    with started(two_hosts, hostfile, run, *options) as process:
        wait_until(lambda: last_step(run) >= 8 or process.poll() is not None)
        before = losses(run)[:8]
        two_hosts.link_down(second)
        try:
            code, err = ended(process, run, 150)
        finally:
            two_hosts.link_up(second)
    assert code == 0, err
    assert f"going on without {second}" in err
    plan = json.loads((run / "plan.json").read_text())
    assert [host["name"] for host in plan["cluster"]["hosts"]] == [first]
    assert plan["world_size"] == 1 and plan["batch"]["global_batch_size"] == 8
    assert [record["step"] for record in steps(run)] == list(range(1, 31))
    assert losses(run)[:8] == pytest.approx(before, rel=1e-5)


def test_without_the_launcher_the_ranks_end(two_hosts: Hosts, hostfile: Path, tmp_path: Path) -> None:
    """And a resume goes on from the newest checkpoint, with the losses of the steps that had been taken already."""
    run = tmp_path / "run"
    with started(two_hosts, hostfile, run, *LONG) as process:
        wait_until(lambda: last_step(run) >= 8 or process.poll() is not None)
        before = losses(run)[:8]
        process.kill()
        process.wait()
        wait_until(lambda: not processes_of(run), NO_ORPHAN_S)
    assert any("the launcher is gone" in log.read_text() for log in (run / "logs").glob("*.rank*.log"))
    argv = [sys.executable, str(ROOT / "launch.py"), "recipe=resume", f"run.dir={run}"]
    until = last_step(run) + 2
    done = two_hosts.exec(two_hosts.names[0], [*argv, f"run.steps={until}"], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in steps(run)] == list(range(1, until + 1))
    assert losses(run)[:8] == before


def test_a_stopped_rank_is_named(two_hosts: Hosts, hostfile: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(two_hosts, hostfile, run, *LONG, "watch.stall_s=6") as process:
        os.kill(pid_of(run, 1), signal.SIGSTOP)
        code, err = ended(process, run)
    assert code == 5, err
    failure = failure_of(run)
    assert (failure["rank"], failure["kind"]) == (1, "stall")
    assert f"rank 1 on {two_hosts.names[1]} does not answer" in str(failure["message"])
    assert "the others wait in" in str(failure["message"])
    stacks = (run / "logs" / f"{two_hosts.names[0]}.rank0.stacks").read_text()
    assert "worker.py" in stacks and "distributed_c10d.py" in stacks


def test_a_cut_network_ends_the_run_with_a_message(two_hosts: Hosts, hostfile: Path, tmp_path: Path) -> None:
    run, second = tmp_path / "run", two_hosts.names[1]
    with started(two_hosts, hostfile, run, *LONG, "watch.stall_s=6") as process:
        two_hosts.link_down(second)
        started_at = time.monotonic()
        try:
            code, err = ended(process, run)
        finally:
            two_hosts.link_up(second)
    assert code == 5, err
    assert time.monotonic() - started_at < 45
    failure = failure_of(run)
    assert (failure["host"], failure["kind"]) == (second, "stall")
    assert "no progress for 6 s" in str(failure["message"]) and f"{second} cannot be reached" in str(failure["message"])


HOSTILE = "a b'c\"d$HOME `id` %h%n%u [x] {y,z} (w);|&<>*?~#!\\ ü,=\t"


def test_hostile_values_and_secrets_arrive_and_leave_no_trace(two_hosts: Hosts, hostfile: Path, tmp_path: Path) -> None:
    """Values of overrides byte for byte on every host; secrets in the ranks' environment and nowhere else."""
    run, out, secret = tmp_path / "a run", tmp_path / "seen", "planted-secret-4711"
    out.mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'worker.py' in ' '.join(sys.orig_argv) and 'RANK' in os.environ:\n"
        "    import atexit, json, threading, time\n"
        "    def look():\n"
        "        time.sleep(3)\n"
        f"        names = ('HOSTILE', 'WANDB_API_KEY', 'HF_TOKEN', 'AWS_SECRET_ACCESS_KEY')\n"
        f"        path = {str(out)!r} + '/' + os.environ['RANK']\n"
        "        open(path, 'w').write(json.dumps({n: os.environ.get(n) for n in names}))\n"
        "    threading.Thread(target=look, daemon=True).start()\n"
    )
    quoted = HOSTILE.replace('"', '\\"')  # Hydra's own escape
    planted = dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"), secret)
    site = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    hook = site / "zz_test_hook.pth"
    hook.write_text(f"import sys; sys.path.insert(0, {str(tmp_path / 'code')!r}); import sitecustomize as _s\n")
    try:
        with started(
            two_hosts, hostfile, run, *LONG[1:], "run.steps=6", f'+cluster.env.HOSTILE="{quoted}"', **planted
        ) as process:
            lines = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
            code, err = ended(process, run)
    finally:
        hook.unlink()
    assert code == 0, err
    for rank in (0, 1):
        assert json.loads((out / str(rank)).read_text()) == {"HOSTILE": HOSTILE, **planted}
    assert secret not in lines
    assert not [path for path in run.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert not list(Path("/dev/shm").glob("zerolaunch-*"))
