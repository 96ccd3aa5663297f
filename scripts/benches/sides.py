"""One request -> the two ways to train it: by launch.py, and by another program on the very same plan.

Used by the benches `loop`, `start` and `hosts`.
Must never give one side a model, a sample, a DeepSpeed key or a variable that the other does not get.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.alternate import Started, alternate, within
from benches.group import ask_plan, rank_command, rank_environment
from benches.request import BenchError, with_defaults
from benches.timing import Ran, base_environment, environment_of_rank, launched, run_to_end
from launcher.command import ROOT, WORKER
from launcher.errors import UserError, format_problems
from launcher.plan import Plan, read_plan
from launcher.rundir import RunDir
from recipes.shared.data.build import prepare


@dataclass(frozen=True)
class Peer:
    """The other program: what it is called, its script for each rank, and how near its losses have to be."""

    name: str
    script: Path
    loss_relative: float


FOLDER = Path(__file__).resolve().parent
# The same arithmetic in the same order: room for the mean over ranks alone, fp32 has 1.2e-7.
BARE = Peer("bare DeepSpeed", FOLDER / "bare_loop.py", 1e-6)
# It divides sums by the number of labels in the step, and the clipping of its engine is its own.
TRAINER = Peer("Hugging Face Trainer", FOLDER / "trainer_loop.py", 1e-4)
# A step takes about 0.3 s on two cores; the schedule is constant so that runs of any length compare.
DEFAULTS = [
    "model=tiny",
    "zero=stage2",
    "schedule=constant",
    "train.sequence_length=256",
    "train.micro_batch_size=8",
    "train.gradient_accumulation_steps=1",
    "eval.samples=2",
]
OWN_TO_A_RUN = {"MASTER_PORT"}


@dataclass(frozen=True)
class Trained:
    """One finished run. `first_step_s`: from the command to the end of the first optimizer step."""

    first_step_s: float
    tokens_per_s: float
    losses: list[float]


@dataclass(frozen=True)
class Steps:
    """What a finished run says of its steps. `ends`: seconds since the epoch."""

    ends: list[float]
    losses: list[float]


class Sides:
    """Both ways to train `overrides` for `steps` optimizer steps, of which the first `skip` are not timed."""

    def __init__(self, overrides: list[str], steps: int, skip: int, folder: Path, other: Peer = BARE) -> None:
        if not 1 <= skip < steps:
            raise BenchError(f"of {steps} steps, {skip} cannot be left out: at least 1, and fewer than all")
        own = [f"run.steps={steps}", "eval.every=0", "checkpoint.every=0"]
        self.overrides = [*with_defaults(DEFAULTS, overrides), *own]
        self.skip, self.folder, self.other = skip, folder, other
        self.environment = base_environment()
        self.plan = ask_plan(self.overrides, self.environment)
        self.check_cluster(self.plan)
        data = self.plan.config.data
        try:
            self.corpus = prepare(data, self.plan.config.train.sequence_length, Path(data["cache_dir"]))
        except UserError as error:
            raise BenchError(format_problems(error.problems, "the corpus cannot be used")) from None
        self.rank_environments: dict[str, dict[str, str] | None] = {}

    def check_cluster(self, plan: Plan) -> None:
        """Raises BenchError where these sides cannot be started on the plan's cluster."""
        if not plan.cluster.local:
            raise BenchError("the two sides are compared on one host: cluster=local")

    def peer_command(self, place: RunDir, request: Path) -> list[str]:
        """The other program, with `request`, on the ranks of the plan in `place`."""
        return rank_command(self.plan, place, self.other.script, request)

    def ours(self) -> Trained:
        """Trains with launch.py."""
        return self._alone("ours")

    def peer(self) -> Trained:
        """Trains with the other program, under the options that launch.py gives to DeepSpeed's launcher."""
        return self._alone("peer")

    def both(self, first: str, window_s: float) -> dict[str, Trained]:
        """Trains with both at once, each of them stopped while the other runs, for `window_s` seconds at a time.

        `first`: the side that is started first. Only steps that lie whole within such a time count.
        """
        order = ["ours", "peer"] if first == "ours" else ["peer", "ours"]

        def start(side: str) -> Started:
            argv, log = self._ready(side), self.folder / f"{side}.log"
            process = launched(argv, log, self._environment(side))
            return Started(process, argv, log, lambda: self._warm(side, process))

        windows = alternate({side: functools.partial(start, side) for side in order}, window_s)
        trained = {}
        for side in order:
            steps = self._steps(side)
            seconds = within(steps.ends[self.skip - 1 :], windows[side])
            if not seconds:
                raise BenchError(f"no step of {side} lies within {window_s:g} s: a longer window, or more steps")
            began = windows[side][0][0]
            trained[side] = self._trained(steps.ends[0] - began, len(seconds), sum(seconds), steps.losses)
        return trained

    def _alone(self, side: str) -> Trained:
        """One side's run with nothing beside it."""
        ran = self._run(side, self._ready(side))
        steps = self._steps(side)
        seconds = steps.ends[-1] - steps.ends[self.skip - 1]
        return self._trained(steps.ends[0] - ran.started, len(steps.ends) - self.skip, seconds, steps.losses)

    def _run(self, side: str, argv: list[str]) -> Ran:
        """At a side's first run, rank 0's environment is noted."""
        watch = self._script(side) if side not in self.rank_environments else None
        ran = run_to_end(argv, self.folder / f"{side}.log", self._environment(side), watch)
        if watch is not None:
            self.rank_environments[side] = ran.rank_environment
        return ran

    def _script(self, side: str) -> Path:
        return WORKER if side == "ours" else self.other.script

    def _environment(self, side: str) -> dict[str, str]:
        return self.environment if side == "ours" else rank_environment(self.plan, self.environment)

    def _ready(self, side: str) -> list[str]:
        """The command that trains, once what it reads is written."""
        place = self.folder / side
        if side == "ours":
            return [sys.executable, str(ROOT / "launch.py"), *self.overrides, f"run.dir={place}"]
        place.mkdir()
        result, request, plan = place / "result.json", place / "request.json", place / "plan.json"
        plan.write_text(json.dumps(self.plan.to_json()), encoding="utf-8")
        content = {"plan": str(plan), "corpus": str(self.corpus), "skip": self.skip, "result": str(result)}
        request.write_text(json.dumps(content | {"warm": str(place / "warm")}), encoding="utf-8")
        return self.peer_command(RunDir(place), request)

    def _warm(self, side: str, process: subprocess.Popen[bytes]) -> bool:
        """Whether the steps that do not count are over; at a side's first run, rank 0's environment is noted."""
        if side not in self.rank_environments:
            self.rank_environments[side] = environment_of_rank(process, self._script(side))
        if side == "ours":
            metrics = RunDir(self.folder / side).metrics
            return metrics.exists() and metrics.read_bytes().count(b"\n") >= self.skip
        return (self.folder / side / "warm").exists()

    def _steps(self, side: str) -> Steps:
        """What the finished run of a side left, which is removed."""
        place = self.folder / side
        if side == "ours":
            run = RunDir(place)
            if _subject(read_plan(run.plan)) != _subject(self.plan):
                raise BenchError(
                    "launch.py made another plan than mode=plan did; were files of conf/ edited meanwhile?"
                )
            lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
            records = [line for line in lines if "loss" in line]
            first = json.loads(run.result.read_text(encoding="utf-8"))["first_step_time"]
            ends = list(itertools.accumulate((record["step_s"] for record in records[1:]), initial=first))
            losses = [record["loss"] for record in records]
        else:
            found = json.loads((place / "result.json").read_text(encoding="utf-8"))
            offset = found["first_step_time"] - found["step_ends"][0]
            ends, losses = [end + offset for end in found["step_ends"]], found["losses"]
        shutil.rmtree(place)
        return Steps(ends, losses)

    def check_same(self, ours: list[Trained], theirs: list[Trained]) -> None:
        """Raises BenchError unless all runs had the same losses, and ranks of both sides the same environment."""
        self.check_losses(ours, theirs)
        mine_env, peer_env = self.rank_environments["ours"], self.rank_environments["peer"]
        assert mine_env and peer_env, "a run that trained had a rank 0"
        differing = sorted(name for name in mine_env | peer_env if mine_env.get(name) != peer_env.get(name))
        if set(differing) - OWN_TO_A_RUN:
            raise BenchError(f"the ranks of the two sides run with different variables: {', '.join(differing)}")

    def check_losses(self, ours: list[Trained], theirs: list[Trained]) -> None:
        """Raises BenchError unless all runs had the same losses."""
        for number, pair in enumerate(zip(ours, theirs, strict=True), 1):
            for step, (mine, its) in enumerate(zip(pair[0].losses, pair[1].losses, strict=True), 1):
                if not math.isclose(mine, its, rel_tol=self.other.loss_relative):
                    raise BenchError(f"pair {number}, step {step}: loss {mine!r} here, {its!r} of {self.other.name}")

    def _trained(self, first_step_s: float, counted: int, seconds: float, losses: list[float]) -> Trained:
        tokens = counted * self.plan.batch.global_batch_size * self.plan.config.train.sequence_length
        return Trained(first_step_s, tokens / seconds, losses)


def _subject(plan: Plan) -> list[Any]:
    """What two runs must share to be the same training."""
    config = plan.config
    return [
        plan.deepspeed,
        plan.batch,
        plan.cluster,
        plan.env,
        config.model,
        config.data,
        config.train,
        config.run.seed,
    ]
