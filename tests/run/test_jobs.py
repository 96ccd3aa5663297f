"""Claims about short jobs: one process answers every request, a problem is the caller's, a death is said.

Run by pytest with real processes; the job is the one that finds checkpoints, which needs no torch.
Must never need a run: there is none to be found.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.errors import UserError
from launcher.run import when_asked, worker

JOB = "find_checkpoint"


def request(run: Path) -> dict[str, Any]:
    return {"run_dir": str(run), "step": None, "best": False}


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if JOB in child.cmdline()]


def test_one_process_answers_again_after_a_problem(tmp_path: Path) -> None:
    with worker(JOB) as ask:
        [process] = children()
        for name in ("one", "two\n"):
            with pytest.raises(UserError) as problem:
                ask(request(tmp_path / name))
            assert name in problem.value.problems[0].got
        assert children() == [process]
    assert not process.is_running()


def test_a_process_is_started_by_the_first_request_alone(tmp_path: Path) -> None:
    with when_asked(JOB) as ask:
        assert children() == []
        for _ in range(2):
            with pytest.raises(UserError):
                ask(request(tmp_path))
        assert len(children()) == 1
    assert children() == []


def test_one_that_died_is_said_and_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(UserError) as problem, worker(JOB) as ask:
        [process] = children()
        os.kill(process.pid, signal.SIGKILL)
        while process.status() != psutil.STATUS_ZOMBIE:  # to wait for it would take its exit code away
            time.sleep(0.01)
        ask(request(tmp_path) | {"long": "x" * 1_000_000})
    assert problem.value.problems[0].got == f"exit code {-signal.SIGKILL}"
    assert children() == []
