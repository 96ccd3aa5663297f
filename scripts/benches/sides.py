"""One request -> the two ways to train it: by launch.py, and by another program on the very same plan.

Used by the benches `loop`, `start` and `hosts`.
Must never give one side a model, a sample, a DeepSpeed key or a variable that the other does not get.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.group import ask_plan, rank_command, rank_environment
from benches.request import BenchError, with_defaults
from benches.timing import Ran, base_environment, run_to_end
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
        run = RunDir(self.folder / "ours")
        ran = self._run("ours", [sys.executable, str(ROOT / "launch.py"), *self.overrides, f"run.dir={run.path}"])
        if _subject(read_plan(run.plan)) != _subject(self.plan):
            raise BenchError("launch.py made another plan than mode=plan did; were files of conf/ edited meanwhile?")
        lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
        records = [line for line in lines if "loss" in line]
        first = json.loads(run.result.read_text(encoding="utf-8"))["first_step_time"]
        seconds = sum(record["step_s"] for record in records[self.skip :])
        shutil.rmtree(run.path)
        return self._trained(ran, first, seconds, [record["loss"] for record in records])

    def peer(self) -> Trained:
        """Trains with the other program, under the options that launch.py gives to DeepSpeed's launcher."""
        place = self.folder / "peer"
        place.mkdir()
        result, request, plan = place / "result.json", place / "request.json", place / "plan.json"
        plan.write_text(json.dumps(self.plan.to_json()), encoding="utf-8")
        content = {"plan": str(plan), "corpus": str(self.corpus), "skip": self.skip, "result": str(result)}
        request.write_text(json.dumps(content), encoding="utf-8")
        ran = self._run("peer", self.peer_command(RunDir(place), request))
        found = json.loads(result.read_text(encoding="utf-8"))
        seconds = found["step_ends"][-1] - found["step_ends"][self.skip - 1]
        shutil.rmtree(place)
        return self._trained(ran, found["first_step_time"], seconds, found["losses"])

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

    def _run(self, side: str, argv: list[str]) -> Ran:
        """One run; at a side's first, rank 0's environment is noted."""
        watch = (WORKER if side == "ours" else self.other.script) if side not in self.rank_environments else None
        environment = self.environment if side == "ours" else rank_environment(self.plan, self.environment)
        ran = run_to_end(argv, self.folder / f"{side}.log", environment, watch)
        if watch is not None:
            self.rank_environments[side] = ran.rank_environment
        return ran

    def _trained(self, ran: Ran, first_step_time: float, seconds: float, losses: list[float]) -> Trained:
        config, timed = self.plan.config, len(losses) - self.skip
        tokens = timed * self.plan.batch.global_batch_size * config.train.sequence_length
        return Trained(first_step_time - ran.started, tokens / seconds, losses)


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
