"""Stalls and slow steps as the launcher sees them: in heartbeats, stacks and metrics that a run leaves.

Run by pytest; stacks are written as the interpreter writes them.
Must never wait: time is moved by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher import watchdog
from launcher.rundir import RunDir
from launcher.schema import WatchSection
from launcher.watchdog import Watchdog, diagnose, slow_hosts, waiting_in

HOSTS = ["alpha", "alpha", "beta", "beta"]
WAITING = """Thread 0x00007f0000000001 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3220 in all_reduce
  File "/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/code/recipes/shared/loop.py", line 101 in agree
  File "/code/recipes/worker.py", line 139 in <module>
"""
ELSEWHERE = """Thread 0x00007f0000000001 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 12 in forward
  File "/home/me/my_model.py", line 33 in forward
  File "/code/recipes/shared/loop.py", line 50 in train
  File "/code/recipes/worker.py", line 139 in <module>
"""
WATCHING = """Current thread 0x00007f0000000002 (most recent call first):
  File "/code/recipes/shared/watch.py", line 90 in _dump

"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def beat(run: RunDir, rank: int, step: int = 7, phase: str = "backward", moves: int = 30, time: float = 1.0) -> None:
    run.heartbeat(rank).write_text(json.dumps({"step": step, "phase": phase, "moves": moves, "time": time}))


def section(**fields: float) -> WatchSection:
    return WatchSection(**({"stall_s": 60.0, "grace_s": 60.0, "slow_factor": 1.5} | fields))


def before(run: RunDir) -> dict[int, Any]:
    """Heartbeats of all ranks, then all of them two seconds later: everyone is alive."""
    found = watchdog.heartbeats(run, len(HOSTS))
    for rank, position in found.items():
        run.heartbeat(rank).write_text(json.dumps(position | {"time": position["time"] + 2}))
    return found


def stacks(run: RunDir, **of: str) -> None:
    for rank, host in enumerate(HOSTS):
        run.rank_stacks(host, rank).write_text(WATCHING + of.get(f"rank{rank}", WAITING))


def test_the_collective_is_read_from_a_stack() -> None:
    assert waiting_in(WAITING) == "all_reduce"
    assert waiting_in(ELSEWHERE) is None and waiting_in("") is None


def test_a_rank_that_does_not_answer_is_the_odd_one(run: RunDir) -> None:
    for rank in range(4):
        beat(run, rank)
    earlier = before(run)
    beat(run, 2)  # as it was: no beat in between
    stacks(run)
    run.rank_stacks("beta", 2).unlink()
    failure = diagnose(run, HOSTS, earlier, 60)
    assert (failure.rank, failure.host, failure.kind) == (2, "beta", "stall")
    assert "rank 2 on beta does not answer" in failure.message
    assert "the others wait in all_reduce (backward of step 7)" in failure.message


def test_a_rank_that_is_elsewhere_is_named_with_the_line_of_code(run: RunDir) -> None:
    for rank in range(4):
        beat(run, rank, phase="forward" if rank == 3 else "backward")
    earlier = before(run)
    stacks(run, rank3=ELSEWHERE)
    failure = diagnose(run, HOSTS, earlier, 60)
    assert failure.rank == 3
    assert "rank 3 on beta is at /home/me/my_model.py:33 in forward (forward of step 7)" in failure.message
    assert failure.log == run.rank_stacks("beta", 3)


def test_ranks_in_different_collectives_are_told_apart(run: RunDir) -> None:
    for rank in range(4):
        beat(run, rank, step=8 if rank == 1 else 7)
    earlier = before(run)
    stacks(run)
    failure = diagnose(run, HOSTS, earlier, 60)
    assert failure.rank == 1 and "rank 1 on alpha is in all_reduce (backward of step 8)" in failure.message


def test_ranks_that_all_wait_for_each_other_are_no_ones_fault(run: RunDir) -> None:
    for rank in range(4):
        beat(run, rank)
    earlier = before(run)
    stacks(run)
    failure = diagnose(run, HOSTS, earlier, 60)
    assert "the network between them, or a device, has stopped; all ranks wait in all_reduce" in failure.message


def test_a_stall_needs_its_time_and_then_time_for_stacks(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    watch = Watchdog(run, HOSTS, section(stall_s=60))
    for rank in range(4):
        beat(run, rank)
    stacks(run)

    def after(seconds: float) -> Any:
        now[0] += seconds
        return watch.stall()

    assert after(3) is None and after(59) is None and not run.dump_request.exists()
    beat(run, 0, moves=31)
    assert after(3) is None and after(59) is None and not run.dump_request.exists()  # it had moved
    assert after(3) is None and run.dump_request.exists()
    assert after(4) is None
    assert after(2).kind == "stall"


def test_before_the_first_step_a_stall_takes_three_times_as_long(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    watch = Watchdog(run, HOSTS, section(stall_s=60))
    beat(run, 0, step=0, phase="starting", moves=0)
    watch.stall()
    now[0] += 179
    assert watch.stall() is None and not run.dump_request.exists()
    now[0] += 5
    assert watch.stall() is None and run.dump_request.exists()


def test_steps_that_become_slow_are_measured_once(run: RunDir) -> None:
    watch = Watchdog(run, HOSTS, section())
    told = [watch.step({"step": step, "step_s": 1.0 if step <= 50 else 2.0}) for step in range(1, 120)]
    assert [step for step, text in enumerate(told, 1) if text] == [56]  # most of the last ten
    assert "a step takes" in str(told[55]) and run.measure_request.exists()
    assert watch.step({"step": 120, "eval_loss": 1.0}) is None


def test_the_slow_host_is_named_from_what_the_ranks_measured(run: RunDir) -> None:
    watch = Watchdog(run, HOSTS, section())
    assert watch.measured() is None
    run.measured.write_text(json.dumps({"step": 9, "seconds": [0.05, 0.05, 0.05, 0.2]}))
    assert watch.measured() == (
        "slow to compute: beta (4.0 times the median); look for other jobs, heat and power limits there"
    )
    assert watch.measured() is None
    assert slow_hosts([0.05, 0.05, 0.06, 0.05], HOSTS).startswith("every rank computes as fast")


def test_the_launcher_shows_that_it_lives(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipes.shared.watch import Launcher

    watch = Watchdog(run, HOSTS, section())
    watch.beat()
    assert not Launcher(run, local=True).gone()
    sign = json.loads(run.launcher_beat.read_text())
    run.launcher_beat.write_text(json.dumps(sign | {"started": "1"}))  # the id now belongs to another process
    assert Launcher(run, local=True).gone()


def test_on_another_host_a_launcher_is_gone_after_nine_silent_seconds(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipes.shared import watch

    now = [1000.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    run.launcher_beat.write_text("1")
    launcher = watch.Launcher(run, local=False)
    found = []
    for _ in range(12):
        found.append(launcher.gone())
        now[0] += 1
    assert found.index(True) == 10
    run.launcher_beat.write_text("2")
    assert not launcher.gone()
    now[0] += 100  # one reading after a file system that hung says nothing
    assert not launcher.gone()
