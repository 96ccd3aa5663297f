"""Starts real runs of the product in fresh processes and reads what they left: metrics, plans, checkpoints.

Used by every test in this folder. Runs are kept for the session, by overrides: tests that need the same run share it.
Must never read results off log text.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from benches.life import last_step as last_step
from benches.life import processes_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model.config.hidden_size=64",
    "model.config.intermediate_size=160",
    "model.config.num_hidden_layers=2",
    "train.sequence_length=64",
    "train.micro_batch_size=2",
    "train.gradient_accumulation_steps=2",
    "eval.samples=12",
    "cluster.accelerator=cpu",
    "cluster.num_procs=2",
]


def launch(*overrides: str, timeout_s: float = 240, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs `python launch.py *overrides` to its end."""
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *overrides],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        **options,
    )


class Runs:
    """Finished runs of this session, by their overrides; the test processes share them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def new(self) -> Path:
        """A path for a run that does not exist yet."""
        return self.folder / f"new-{os.getpid()}-{time.monotonic_ns()}"

    def get(self, *overrides: str) -> Path:
        """Folder of the finished run with these overrides on top of SMALL; started when nobody asked for it before."""
        name = hashlib.sha256(json.dumps(overrides).encode()).hexdigest()[:12]
        folder, failure = self.folder / name, self.folder / f"{name}.failed"
        with FileLock(self.folder / f"{name}.lock"):
            if not folder.exists() and not failure.exists():
                done = launch(*SMALL, *overrides, f"run.dir={folder}")
                if done.returncode:
                    failure.write_text(done.stdout + done.stderr)
        assert not failure.exists(), failure.read_text()
        return folder


def records(run: Path) -> list[dict[str, Any]]:
    """Every object of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps(run: Path) -> list[dict[str, Any]]:
    """The objects of optimizer steps."""
    return [record for record in records(run) if "loss" in record]


def losses(run: Path) -> list[float]:
    """Loss of every optimizer step."""
    return [record["loss"] for record in steps(run)]


def start(*overrides: str) -> subprocess.Popen[str]:
    """Starts `python launch.py *overrides` and returns at once."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), *overrides], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_until(condition: Callable[[], Any], timeout_s: float = 120) -> Any:
    """The first true value of `condition`, polled; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"still not true after {timeout_s} s: {condition}")


def kill_everything(run: Path) -> None:
    """SIGKILL to the launcher, the front-end, its node launcher and every rank of a run, at once."""
    for process in processes_of(run):
        process.kill()
    wait_until(lambda: not processes_of(run), 30)
