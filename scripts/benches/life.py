"""One attempt of a run, from its start to a SIGKILL at a chosen moment, or to its end.

Used by `benches.lives`; tests take `last_step` and `processes_of`.
Must never read a result off log text, nor return from a kill while anything of the run is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benches.request import BenchError
from benches.timing import LAST_LINES, base_environment, descendants, kill_tree
from launcher.command import ROOT
from launcher.errors import EXIT_TRAINING
from launcher.rundir import RunDir, read_json

STAGING = ".saving-"
PATIENCE_S = 600.0  # for anything that a run does, on a machine that others keep busy too
END_S = 60.0  # for the rest of a run to end after one rank was killed
TIGHT_S, LOOSE_S = 0.001, 0.02  # a save takes 50 ms and more
A_STEP_S = 0.1
STEPS_MORE = 4


class Life:
    """One attempt. `words`: its command line without run.dir; `step`: where it goes on; `chance` sets the moments."""

    def __init__(self, run: RunDir, words: list[str], step: int, chance: random.Random) -> None:
        self.run, self.step, self.chance = run, step, chance
        self.plan_before, self.latest_before = self._plan(), self._latest()
        self.leftovers: set[str] = set()
        self.leftovers = self._saves()
        self.log = run.path.with_name(f"{run.path.name}.log")
        self.began = time.monotonic()
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "launch.py"), *words, f"run.dir={run.path}"],
                env=base_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def took_up(self) -> bool:
        """Whether this attempt has a plan of its own: it has chosen where to go on."""
        return self._plan() != self.plan_before

    @property
    def ended(self) -> bool:
        """Whether the launcher has left."""
        return self.process.poll() is not None

    def until_start(self, within_s: float) -> None:
        """Waits for a moment in the first `within_s`, before the first step."""
        until = self.began + self.chance.random() * within_s
        self.wait(lambda: time.monotonic() >= until)

    def until_training(self) -> float:
        """Waits for the first step; returns how long that took since the start, in seconds."""
        self.wait(lambda: self.took_up and last_step(self.run.path) > self.step)
        return time.monotonic() - self.began

    def until_step(self) -> None:
        """Waits until a new checkpoint stands, for up to STEPS_MORE steps more, and for a part of one."""
        self.wait(lambda: self._latest() != self.latest_before)
        until = last_step(self.run.path) + self.chance.randrange(STEPS_MORE + 1)
        self.wait(lambda: last_step(self.run.path) >= until)
        time.sleep(self.chance.random() * A_STEP_S)

    def until_save(self) -> None:
        """Waits through one save to learn how long it takes, then for a moment within another."""
        self.wait(self._saves, TIGHT_S)
        began = time.monotonic()
        self.wait(lambda: not self._saves(), TIGHT_S)
        length_s = time.monotonic() - began
        while not self.ended:
            self.wait(self._saves, TIGHT_S)
            time.sleep(self.chance.random() * length_s)
            if self._saves():
                return

    def until_end(self) -> None:
        """Waits for its end; raises BenchError, with the last lines, unless it ended well."""
        self.wait(lambda: False)
        self._check_code(0)

    def kill(self, rank: int | None) -> tuple[str, int | None]:
        """SIGKILL to `rank` (None, or no such process: to everything), until nothing is left of the run.

        Returns who it was, and the step of the save that it fell into: one whose temporary folder was there before the
        signal, and was there after the death or never became a checkpoint (ranks that live on remove it).
        """
        top = psutil.Process(self.process.pid)
        everyone = {top, *descendants(top), *processes_of(self.run.path)}
        chosen = self._process_of(rank) if rank is not None else None
        victims = {process for process in everyone if process == chosen} or everyone
        before = self._saves()
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        self._await(lambda: not any(map(_lives, victims)), TIGHT_S)
        after = self._saves()
        self._await(lambda: self.ended)
        if victims != everyone:
            self._check_code(EXIT_TRAINING)
        self._await(lambda: not processes_of(self.run.path))
        steps = {name: int(name.removeprefix(STAGING).partition("-")[0]) for name in before}
        met = [step for name, step in steps.items() if name in after or not self.run.checkpoint(step).exists()]
        return "everything" if victims == everyone else f"rank {rank}", min(met, default=None)

    def end(self) -> None:
        """Kills whatever is left, after something went wrong here."""
        kill_tree(self.process)
        for process in processes_of(self.run.path):
            process.kill()

    def wait(self, condition: Callable[[], object], poll_s: float = LOOSE_S) -> None:
        """Until `condition` holds or the launcher has left."""
        self._await(lambda: condition() or self.ended, poll_s, PATIENCE_S)

    def _await(self, condition: Callable[[], object], poll_s: float = LOOSE_S, limit_s: float = END_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                alive = [" ".join(process.cmdline()) for process in processes_of(self.run.path)]
                raise BenchError(f"nothing happened for {limit_s:.0f} s; alive: {alive}{self._said()}")
            time.sleep(poll_s)

    def _check_code(self, expected: int) -> None:
        code = self.process.wait()
        if code != expected:
            raise BenchError(f"exit code {code} instead of {expected}{self._said()}")

    def _said(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return "".join(f"\n  | {line}" for line in lines)

    def _plan(self) -> int | None:
        return self.run.plan.stat().st_mtime_ns if self.run.exists else None

    def _latest(self) -> str | None:
        return self.run.latest.read_text() if self.run.latest.exists() else None

    def _saves(self) -> set[str]:
        """Temporary folders of this attempt's saves."""
        try:
            names = {entry.name for entry in os.scandir(self.run.checkpoints)}
        except FileNotFoundError:
            return set()
        return {name for name in names if name.startswith(STAGING)} - self.leftovers

    def _process_of(self, rank: int) -> psutil.Process | None:
        entry = read_json(self.run.pid(rank))
        try:
            return psutil.Process(entry["pid"]) if entry else None
        except psutil.NoSuchProcess:
            return None


def last_step(run: Path) -> int:
    """Newest step in metrics.jsonl, 0 before the first; tolerates a line that is being written."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        if line.endswith("}"):
            return int(json.loads(line)["step"])
    return 0


def processes_of(run: Path) -> list[psutil.Process]:
    """Live processes whose command line names a file of this run."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(
            str(run) in word for word in process.info["cmdline"] or ()
        ):
            found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return False
