"""One run that is killed and continued, again and again, and at its end compared with the run that never was.

Used by the bench `kill` and by tests/train/test_kill.py.
Must never take a checkpoint for whole because the product did: its files are those of the finished reference's.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.life import Life, last_step
from benches.request import BenchError
from launcher.errors import UserError
from launcher.plan import read_plan
from launcher.rundir import RunDir
from recipes.shared.checkpoint import find, manifest

COMPUTED = ("step", "loss", "lr", "grad_norm", "eval_loss")


@dataclass(frozen=True)
class Death:
    """One kill. `victim`: "rank R" or "everything"; `save`: step of the save it fell into, None when in none.

    `logged` and `committed`: the newest step in metrics.jsonl and of a whole checkpoint, once all processes are gone.
    """

    victim: str
    save: int | None
    logged: int
    committed: int

    @property
    def lost(self) -> int:
        """Optimizer steps that have to be taken again."""
        return self.logged - self.committed


class Lives:
    """The lives of one run. `reference`: the same run, finished and never killed.

    `deaths`: what each kill left; `wrong_choices`: every resume from anything but the newest whole checkpoint, in
    words; `ended`: whether the run has come to its last step.
    """

    def __init__(self, run: RunDir, overrides: list[str], reference: RunDir, chance: random.Random) -> None:
        self.run, self.overrides, self.reference, self.chance = run, overrides, reference, chance
        plan = read_plan(reference.plan)
        self.steps, self.world_size = plan.config.run.steps, plan.world_size
        self.files = {path.name for path in find.newest(reference).iterdir()}
        self.deaths: list[Death] = []
        self.wrong_choices: list[str] = []
        self.ended = False
        self.newest: Path | None = None
        self.start_s = 0.0

    def die(self, moment: str) -> None:
        """Starts or continues the run and kills it at `moment`, unless it comes to its end before.

        "start": before the first step. "step" and "save": once a new checkpoint stands, anywhere, or within a save.
        A run without a checkpoint cannot be continued: it is killed within a save where "start" is asked for.
        """
        life = self._live()
        try:
            if moment == "start" and self.newest is not None:
                life.until_start(self.start_s)
            else:
                self.start_s = life.until_training()
                life.until_step() if moment == "step" else life.until_save()
            if life.ended:
                return self._end(life)
            rank = self.chance.choice([*range(self.world_size), *[None] * self.world_size])  # a rank in half of them
            victim, save = life.kill(rank)
        except BaseException:
            life.end()
            raise
        self._check_choice(life)
        logged = max(last_step(self.run.path), self._step())
        try:
            self.newest = find.newest(self.run)
        except UserError as error:
            raise BenchError(f"nothing is left of {self.run.path.name} after {victim} was killed: {error}") from None
        self.deaths.append(Death(victim, save, logged, self._step()))
        self.ended = self._step() == self.steps

    def finish(self) -> None:
        """Lets the run live to its end."""
        if not self.ended:
            life = self._live()
            try:
                self._end(life)
            except BaseException:
                life.end()
                raise

    def difference(self) -> str | None:
        """The first place where the finished run's joined curve leaves the reference's; None when it never does."""
        mine, theirs = _curve(self.run), _curve(self.reference)
        for here, there in zip(mine, theirs, strict=False):
            if here != there:
                return f"{here} instead of {there}"
        return None if len(mine) == len(theirs) else f"{len(mine)} records instead of {len(theirs)}"

    def _live(self) -> Life:
        words = ["recipe=resume"] if self.run.exists else self.overrides
        return Life(self.run, words, self._step(), self.chance)

    def _end(self, life: Life) -> None:
        life.until_end()
        self._check_choice(life)
        self.ended = True

    def _step(self) -> int:
        return 0 if self.newest is None else manifest.step_of(self.newest)

    def _check_choice(self, life: Life) -> None:
        """Looks at what the life went on from; no resume deletes that."""
        if self.newest is None or not life.took_up:
            return
        chosen = Path(str(read_plan(self.run.plan).resume_from))
        found = {path.name for path in chosen.iterdir()}
        problem = manifest.problem_of(chosen)
        if found != self.files:
            problem = f"it holds {sorted(found)} instead of {sorted(self.files)}"
        if chosen != self.newest:
            problem = f"the newest whole one is {self.newest.name}"
        if problem is not None:
            self.wrong_choices.append(f"{chosen.name}: {problem}")


def _curve(run: RunDir) -> list[dict[str, Any]]:
    """What is computed, of every record; times and memory are not."""
    records = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    return [{key: record.get(key) for key in COMPUTED} for record in records]
