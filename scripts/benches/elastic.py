"""Time to load a checkpoint on other numbers of ranks, over DeepSpeed's conversion and load of the same one.

`scripts/bench elastic [pairs=3] [millions=130] [stage=3] [ranks=0] [overrides]`; the other size is millions=400.
Saved on 2 ranks, loaded on 1 and 4, or on `ranks` alone; theirs is `python -m deepspeed.checkpoint.ds_to_universal` and
`engine.load_checkpoint`.
Must never compare loads that left different masters, moments or weights.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.group import ask_ranks, resumed, saved_run, warm
from benches.report import GIB, Row, ratios
from benches.request import BenchError, Request
from benches.timing import base_environment, in_turn, run_to_end
from launcher.plan import Plan
from recipes.shared.checkpoint.manifest import step_of

OPTIONS = {"pairs": 3, "millions": 130, "stage": 3, "ranks": 0, "extract_workers": 4, "merge_workers": 2, "threads": 1}
RANKS = (1, 4)
AT_MOST = 0.30
MODULE = "deepspeed.checkpoint.ds_to_universal"


@dataclass(frozen=True)
class Turn:
    """One side's loads, by number of ranks. `before_s`: conversion; `import_s`: what starting that process took."""

    answers: dict[int, list[dict[str, Any]]]
    disk_bytes: int
    before_s: float = 0.0
    import_s: float = 0.0

    def load_s(self, ranks: int) -> float:
        """Until the last rank is ready, without the conversion."""
        return max(answer["seconds"] for answer in self.answers[ranks])

    def memory_gib(self, ranks: int) -> float:
        """Of the rank whose anonymous memory grew most."""
        return float(max(answer["memory_bytes"] for answer in self.answers[ranks])) / GIB


class Elastic:
    """Both ways to load the checkpoint of one run on each of RANKS."""

    def __init__(self, request: Request, folder: Path) -> None:
        self.options, self.folder = request.options, folder
        self.run = saved_run(folder, self.options["millions"], self.options["stage"], request.overrides)
        loaded_on = (self.options["ranks"],) if self.options["ranks"] else RANKS
        self.plans = {ranks: resumed(self.run, f"cluster.num_procs={ranks}") for ranks in loaded_on}
        self.saved = Path(str(self.plans[loaded_on[0]].resume_from))
        self.universal = self.saved.with_name(f"{self.saved.name}_universal")

    def ours(self) -> Turn:
        """The product's restore, from the shards as they are."""
        before = disk_bytes(self.run.path)
        answers = {ranks: self._load(plan, None) for ranks, plan in self.plans.items()}
        return Turn(answers, disk_bytes(self.run.path) - before)

    def theirs(self) -> Turn:
        """DeepSpeed's: one conversion, then a load on each number of ranks."""
        warm(self.saved)
        import_s = self._convert("--help")
        before_s = self._convert(*self._conversion())
        used = disk_bytes(self.universal)
        answers = {ranks: self._load(universal(plan), self.universal) for ranks, plan in self.plans.items()}
        self._remove()
        return Turn(answers, used, before_s, import_s)

    def peak_disk_bytes(self) -> int:
        """What a conversion has on the disk at its end, before it removes its temporary files."""
        self._convert(*self._conversion(), "--keep_temp_folder")
        used = disk_bytes(self.universal)
        self._remove()
        return used

    def _load(self, plan: Plan, folder: Path | None) -> list[dict[str, Any]]:
        return ask_ranks(plan, "benches.elastic_rank", {"universal": folder and str(folder)}, self.folder)

    def _conversion(self) -> list[str]:
        argv = ["--input_folder", str(self.saved), "--output_folder", str(self.universal)]
        argv += ["--num_extract_workers", str(self.options["extract_workers"])]
        argv += ["--num_merge_workers", str(self.options["merge_workers"])]
        return argv if self.options["stage"] == 3 else [*argv, "--inject_missing_state"]

    def _convert(self, *arguments: str) -> float:
        """Seconds. Its processes are many for two cores: with torch's own number of threads each, they take longer."""
        environment = base_environment() | {"OMP_NUM_THREADS": str(self.options["threads"])}
        argv = [sys.executable, "-m", MODULE, *arguments]
        return run_to_end(argv, self.folder / "convert.log", environment).seconds

    def _remove(self) -> None:
        shutil.rmtree(self.universal)
        (self.universal.parent / "latest_universal").unlink()


def universal(plan: Plan) -> Plan:
    """The same, with DeepSpeed told that what it loads is a universal checkpoint."""
    checkpoint = plan.deepspeed.get("checkpoint", {}) | {"load_universal": True}
    return dataclasses.replace(plan, deepspeed=plan.deepspeed | {"checkpoint": checkpoint})


def run(request: Request) -> list[Row]:
    """Per number of ranks a ratio and the growth of memory; extra disk of both."""
    with tempfile.TemporaryDirectory(prefix="zerolaunch-bench-") as folder:
        both = Elastic(request, Path(folder))
        peak = both.peak_disk_bytes()
        turns = in_turn(request.options["pairs"], {"ours": both.ours, "theirs": both.theirs})
    ours, theirs = turns["ours"], turns["theirs"]
    for ranks in both.plans:
        check_same(ranks, step_of(both.saved), [*ours, *theirs])
    rows = [row for ranks in both.plans for row in rows_of(ranks, ours, theirs)]
    parts = {
        "theirs, kept, GiB": [turn.disk_bytes / GIB for turn in theirs],
        "theirs, with temporary files, GiB": [peak / GIB],
    }
    used = [turn.disk_bytes / GIB for turn in ours]
    return [*rows, Row("extra disk of a load", "GiB", used, at_most=0.0, parts=parts)]


def rows_of(ranks: int, ours: list[Turn], theirs: list[Turn]) -> list[Row]:
    """Time and memory of loading on `ranks` ranks."""
    where = f"on {ranks} rank{'s' if ranks > 1 else ''}"
    mine = [turn.load_s(ranks) for turn in ours]
    whole = [turn.before_s + turn.load_s(ranks) for turn in theirs]
    started = [total - turn.import_s for total, turn in zip(whole, theirs, strict=True)]
    parts = {
        "ours, s": mine,
        "theirs, s": whole,
        "theirs, conversion, s": [turn.before_s for turn in theirs],
        "theirs, of that starting the process, s": [turn.import_s for turn in theirs],
        "theirs, load, s": [turn.load_s(ranks) for turn in theirs],
        "ratio without their process start": ratios(mine, started),
    }
    memory = {"theirs, GiB": [turn.memory_gib(ranks) for turn in theirs]}
    return [
        Row(f"time to load {where} over convert and load", "ratio", ratios(mine, whole), at_most=AT_MOST, parts=parts),
        Row(
            f"growth of a rank's anonymous memory {where}",
            "GiB",
            [turn.memory_gib(ranks) for turn in ours],
            parts=memory,
        ),
    ]


def check_same(ranks: int, step: int, turns: list[Turn]) -> None:
    """Raises BenchError unless every load of every rank stood at `step` and left the same bytes."""
    for turn in turns:
        for rank, answer in enumerate(turn.answers[ranks]):
            where, expected = f"rank {rank} of {ranks}", turns[0].answers[ranks][rank]["state"]
            if answer["steps"] != [step, step]:
                raise BenchError(f"{where}: engine and Adam stand at steps {answer['steps']}, not {step}")
            odd = sorted({name for name, _ in expected.items() ^ answer["state"].items()})
            if odd:
                raise BenchError(f"{where}: the loads differ in {len(odd)} tensors: {', '.join(odd[:3])}")


def disk_bytes(folder: Path) -> int:
    """What the files of `folder` take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
