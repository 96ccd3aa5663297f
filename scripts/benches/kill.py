"""What SIGKILLs cost: one rank or everything is killed at random moments, many within a save, and the run resumed.

`scripts/bench kill [kills=50] [seed=1] [overrides]`; stages 1 and 3, checkpoints written at once and in the background.
Must never end with fewer kills within saves than it promises.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from pathlib import Path

from benches.lives import Death, Lives
from benches.report import Row
from benches.request import BenchError, Request, with_defaults
from benches.timing import base_environment, run_to_end
from launcher.command import ROOT
from launcher.rundir import RunDir

OPTIONS = {"kills": 50, "seed": 1}
KINDS = [(stage, background) for stage in (1, 3) for background in (False, True)]
MOMENTS = ("save", "step", "save", "start")
WITHIN_SAVES = 0.4  # of all kills, at least
EVERY = 4
STEPS_A_KILL = 2 * EVERY  # the mean: a start takes none, a save that is met the second after a checkpoint
DEFAULTS = [
    "model.config.hidden_size=64",
    "model.config.intermediate_size=160",
    "model.config.num_hidden_layers=2",
    "train.sequence_length=64",
    "train.micro_batch_size=2",
    "train.gradient_accumulation_steps=1",
    "eval.samples=12",
    "cluster.accelerator=cpu",
    "cluster.num_procs=2",
]


class Ordeal:
    """Runs of one kind, `lives`, each killed until it comes to its end. Their folders begin with `place`."""

    def __init__(self, overrides: list[str], reference: RunDir, place: Path, chance: random.Random) -> None:
        self.overrides, self.reference, self.place, self.chance = overrides, reference, place, chance
        self.lives: list[Lives] = []

    @property
    def deaths(self) -> list[Death]:
        """What every kill left."""
        return [death for lives in self.lives for death in lives.deaths]

    @property
    def within_saves(self) -> list[Death]:
        """The kills that fell into a save."""
        return [death for death in self.deaths if death.save is not None]

    def suffer(self, kills: int) -> None:
        """Kills `kills` times, and more until WITHIN_SAVES of them fell into saves; every run is lived to its end."""
        while (number := len(self.deaths)) < kills or len(self.within_saves) < math.ceil(WITHIN_SAVES * kills):
            if number >= 2 * kills:
                raise BenchError(f"of {number} kills only {len(self.within_saves)} fell into a save")
            if not self.lives or self.lives[-1].ended:
                run = RunDir(self.place.with_name(f"{self.place.name}-{len(self.lives) + 1}"))
                self.lives.append(Lives(run, self.overrides, self.reference, self.chance))
            self.lives[-1].die(MOMENTS[number % len(MOMENTS)] if number < kills else "save")
            for death in self.deaths[number:]:
                print(f"· {self.place.name}, kill {number + 1}: {death}", file=sys.stderr, flush=True)
        for lives in self.lives:
            lives.finish()
            if (difference := lives.difference()) is not None:
                print(f"· {lives.run.path.name} is another curve: {difference}", file=sys.stderr, flush=True)
            for choice in lives.wrong_choices:
                print(f"· {lives.run.path.name} went on from {choice}", file=sys.stderr, flush=True)


def run(request: Request) -> list[Row]:
    """The kills are shared out over the four kinds of run; a stage's curves are held against one run never killed."""
    kills, seed = request.options["kills"], request.options["seed"]
    if kills < len(KINDS):
        raise BenchError(f"kills is at least {len(KINDS)}: one for each stage and way to write checkpoints")
    shares = [kills // len(KINDS) + (number < kills % len(KINDS)) for number in range(len(KINDS))]
    own = [f"run.steps={STEPS_A_KILL * (max(shares) + 1)}", "eval.every=0", f"checkpoint.every={EVERY}"]
    overrides = [*with_defaults(DEFAULTS, request.overrides), *own]
    at_once: list[Ordeal] = []
    in_background: list[Ordeal] = []
    with tempfile.TemporaryDirectory(prefix="zerolaunch-bench-") as folder:
        for (stage, background), share in zip(KINDS, shares, strict=True):
            words, reference = [*overrides, f"zero=stage{stage}"], RunDir(Path(folder) / f"stage{stage}")
            if not reference.exists:
                argv = [sys.executable, str(ROOT / "launch.py"), *words, f"run.dir={reference.path}"]
                run_to_end(argv, Path(folder) / "reference.log", base_environment())
            words.append(f"checkpoint.background={str(background).lower()}")
            place = Path(folder) / f"stage{stage}-{'background' if background else 'at-once'}"
            ordeal = Ordeal(words, reference, place, random.Random(f"{seed} {place.name}"))
            ordeal.suffer(share)
            (in_background if background else at_once).append(ordeal)
        return rows(at_once, in_background, kills)


def rows(at_once: list[Ordeal], in_background: list[Ordeal], kills: int) -> list[Row]:
    """What is claimed of all runs, then the steps lost, by the way in which their checkpoints are written."""
    ordeals = [*at_once, *in_background]
    lives = [each for ordeal in ordeals for each in ordeal.lives]
    deaths = [death for each in lives for death in each.deaths]
    of_all = [death for death in deaths if death.victim == "everything"]
    within = [[death for ordeal in some for death in ordeal.within_saves] for some in (at_once, in_background)]
    committed = [death for some in within for death in some if death.committed == death.save]
    unequal = [each for each in lives if each.difference() is not None]
    wrong = [choice for each in lives for choice in each.wrong_choices]
    victims = {"of everything": [float(len(of_all))], "of one rank": [float(len(deaths) - len(of_all))]}
    saves = {
        "written at once": [float(len(within[0]))],
        "written in the background": [float(len(within[1]))],
        "committed all the same": [float(len(committed))],
    }
    least = math.ceil(WITHIN_SAVES * kills)
    return [
        Row("SIGKILLs", "kills", [len(deaths)], at_least=kills, parts=victims),
        Row("SIGKILLs within a save", "kills", [sum(map(len, within))], at_least=least, parts=saves),
        Row("joined curves that differ", "runs", [len(unequal)], at_most=0, parts={"runs": [float(len(lives))]}),
        Row("half checkpoints chosen", "resumes", [len(wrong)], at_most=0),
        _lost("most steps lost, checkpoints written at once", at_once, EVERY),
        # A save in the background is committed before the next one begins: the newest may be that of two saves ago.
        _lost("most steps lost, checkpoints written in the background", in_background, 2 * EVERY),
    ]


def _lost(what: str, ordeals: list[Ordeal], bound: int) -> Row:
    lost = [float(death.lost) for ordeal in ordeals for death in ordeal.deaths]
    return Row(what, "steps", [max(lost)], at_most=bound, parts={"each kill": lost})
