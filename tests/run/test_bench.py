"""Every bench runs once, at a size where its figures mean nothing, and leaves the rows it promises.

The loop and start benches share how they train both sides; for them real training is started once, for `loop`.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from launcher.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
# One rank, and an optimizer that needs no compiled operator: what remains is starting Python.
TINY = [
    "cluster.accelerator=cpu",
    "cluster.num_procs=1",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=1",
    "train.sequence_length=32",
    "train.micro_batch_size=2",
    "train.gradient_accumulation_steps=2",
    "deepspeed.optimizer.params.torch_adam=true",
    "data.max_bytes=300000",
]
TWO_RANKS = ["model=tiny", *(word for word in TINY if word != "cluster.num_procs=1")]
ROW = {
    *("bench", "what", "unit", "median", "min", "max", "bound", "holds", "values", "parts"),
    *("options", "overrides", "cpus", "date", "command", "revision", "changed_files", "versions", "hardware"),
}


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs `scripts/bench *words` to its end."""
    argv = [sys.executable, str(ROOT / "scripts" / "bench"), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The JSON rows of a finished bench: its last lines, as many as its table shows."""
    assert done.returncode in (0, 1), done.stderr  # 1: a bound is missed, as it may be at this size
    lines = done.stdout.splitlines()
    shown = [line for line in lines if line.split()[-1] in ("holds", "MISSED")]
    found = [json.loads(line) for line in lines[-len(shown) :]]
    assert done.returncode == int(not all(row["holds"] for row in found))
    for row in found:
        assert row.keys() == ROW
        assert len(row["values"]) == 1 and row["min"] == row["median"] == row["max"] == row["values"][0]
        assert row["hardware"]["cpu"] and row["hardware"]["cores"] and row["versions"]["deepspeed"]
    return found


def test_plan_bench_compares_planning_and_help_to_deepspeeds_help() -> None:
    mode_plan, show_help = rows_of(bench("plan", "pairs=1", "warm_up=0", "zero=stage3"))
    for row, ours in ((mode_plan, "launch.py mode=plan"), (show_help, "launch.py --help")):
        assert row["what"] == f"{ours} over deepspeed --help"
        assert row["bound"] == "at most 0.35"
        assert row["overrides"] == ["zero=stage3"]
        assert row["median"] > 0
        assert row["median"] == row["parts"][f"{ours}, s"][0] / row["parts"]["deepspeed --help, s"][0]


@pytest.mark.train
def test_loop_bench_trains_both_sides_alike(tmp_path: Path) -> None:
    [row] = rows_of(bench("loop", "pairs=1", "steps=3", "skip=1", *TINY, f"data.cache_dir={tmp_path}"))
    assert row["bound"] == "at least 0.98"
    assert row["command"].startswith("scripts/bench loop pairs=1 steps=3 skip=1 ")
    assert row["median"] == row["parts"]["ours, tokens/s"][0] / row["parts"]["bare, tokens/s"][0] > 0


@pytest.mark.train
def test_the_trainer_has_the_same_losses_over_twenty_steps(tmp_path: Path) -> None:
    """Two ranks and two passes a step, whose losses it sums; the bench stops where a loss differs."""
    two = [word for word in TINY if "num_procs" not in word] + ["cluster.num_procs=2", "zero=stage3"]
    [row] = rows_of(bench("loop", "peer=trainer", "pairs=1", "steps=20", "skip=5", *two, f"data.cache_dir={tmp_path}"))
    assert row["what"] == "tokens/s over Hugging Face Trainer" and row["bound"] == "at least 1.0"
    assert row["median"] == row["parts"]["ours, tokens/s"][0] / row["parts"]["trainer, tokens/s"][0] > 0


@pytest.mark.train
def test_audit_bench_times_steps_after_those_that_are_watched(tmp_path: Path) -> None:
    words = ["audit", "pairs=1", "steps=3", "skip=2", "audit.steps=1", *TINY, f"data.cache_dir={tmp_path}"]
    [row] = rows_of(bench(*words))
    assert row["bound"] == "at most 1.02"
    assert row["median"] == pytest.approx(
        row["parts"]["audit=off, tokens/s"][0] / row["parts"]["audit=warn, tokens/s"][0]
    )


@pytest.mark.train
def test_save_bench_saves_both_ways_in_one_run(tmp_path: Path) -> None:
    rows = rows_of(bench("save", "pairs=1", *TWO_RANKS, f"data.cache_dir={tmp_path}"))
    blocked, with_loss, step, with_steps, memory = rows
    assert [row["bound"] for row in rows] == ["at most 0.2", "none", "none", "none", "none"]
    assert blocked["median"] == blocked["parts"]["background, s"][0] / blocked["parts"]["at once, s"][0] > 0
    assert with_loss["parts"]["background, s"][0] > 0
    assert step["parts"]["steps beside the writing"][0] >= 1 and step["median"] > 0
    assert with_steps["median"] != blocked["median"]
    assert memory["parts"].keys() == {"at once, GiB"}


@pytest.mark.train
@pytest.mark.slow
def test_elastic_bench_loads_what_deepspeeds_own_conversion_does(tmp_path: Path) -> None:
    """It ends without rows where a byte of masters, moments or weights differs."""
    rows = rows_of(bench("elastic", "pairs=1", *TWO_RANKS, f"data.cache_dir={tmp_path}"))
    for row, ranks in ((rows[0], "1 rank"), (rows[2], "4 ranks")):
        assert row["what"] == f"time to load on {ranks} over convert and load"
        assert row["bound"] == "at most 0.3"
        assert row["median"] == row["parts"]["ours, s"][0] / row["parts"]["theirs, s"][0] > 0
        assert row["parts"]["theirs, s"][0] > row["parts"]["theirs, conversion, s"][0] > 0
    assert rows[-1]["values"] == [0.0] and rows[-1]["parts"]["theirs, kept, GiB"][0] > 0


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(ours, theirs): one turn each of the elastic bench, with recorded answers of one rank."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benches import elastic

    def turn() -> Any:
        answer = {"seconds": 1.0, "memory_bytes": 0, "steps": [1, 1], "state": {"master 0": "a", "exp_avg 0": "b"}}
        return elastic.Turn({1: [answer]}, 0)

    return turn(), turn()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", [1, 0], r"rank 0 of 1: engine and Adam stand at steps \[1, 0\], not 1"),
        ("state", {"master 0": "a", "exp_avg 0": "c"}, "rank 0 of 1: the loads differ in 1 tensors: exp_avg 0"),
        ("state", {"master 0": "a"}, "the loads differ in 1 tensors: exp_avg 0"),
    ],
)
def test_loads_that_left_something_else_are_not_compared(loads: Any, name: str, value: Any, message: str) -> None:
    from benches import elastic
    from benches.request import BenchError

    elastic.check_same(1, 1, [*loads])
    loads[1].answers[1][0][name] = value
    with pytest.raises(BenchError, match=message):
        elastic.check_same(1, 1, [*loads])


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What `start` runs, with recorded values in place of training; its plan and corpus are real."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benches import sides, start

    class Recorded(sides.Sides):
        made: ClassVar[dict[str, list[Any]]] = {
            "ours": [sides.Trained(s, 1.0, [5.0, 4.0]) for s in (90.0, 11.0, 12.0)],
            "bare": [sides.Trained(s, 1.0, [5.0, 4.0]) for s in (10.0, 10.0, 10.0)],
        }
        environments: ClassVar[dict[str, dict[str, str]]] = {
            "ours": {"A": "1", "MASTER_PORT": "1"},
            "peer": {"A": "1", "MASTER_PORT": "2"},
        }

        def ours(self) -> Any:
            self.rank_environments = self.environments
            return self.made["ours"].pop(0)

        def peer(self) -> Any:
            return self.made["bare"].pop(0)

    monkeypatch.setattr(start, "Sides", Recorded)
    return Recorded


def start_rows(*words: str) -> Any:
    """What the start bench makes of `words`."""
    from benches import request, start

    return start.run(request.parse(list(words), start.OPTIONS))


def test_start_bench_leaves_the_warm_up_out(sides: Any) -> None:
    [row] = start_rows("pairs=2", "warm_up=1", *TINY)
    assert row.values == [1.1, 1.2]
    assert row.median == pytest.approx(1.15)
    assert row.parts == {"ours, s": [11.0, 12.0], "bare, s": [10.0, 10.0]}


def test_sides_with_different_losses_are_not_compared(sides: Any) -> None:
    from benches.request import BenchError

    sides.made["bare"][1].losses[1] *= 1 + 3e-6
    with pytest.raises(BenchError, match=r"pair 2, step 2: loss 4\.0 here, 4\.000012 of bare DeepSpeed"):
        start_rows("pairs=2", "warm_up=1", *TINY)


def test_sides_with_different_environments_are_not_compared(sides: Any) -> None:
    from benches.request import BenchError

    sides.environments["peer"]["OMP_NUM_THREADS"] = "1"
    with pytest.raises(BenchError, match="different variables: MASTER_PORT, OMP_NUM_THREADS"):
        start_rows("pairs=2", "warm_up=1", *TINY)


def test_torch_in_the_process_that_plans_is_refused(sides: Any, tmp_path: Path) -> None:
    from benches.plan import refuse_heavy_imports
    from benches.request import BenchError

    script = tmp_path / "heavy.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r}); import launcher.errors, numpy")
    with pytest.raises(BenchError, match=r"heavy\.py loads numpy"):
        refuse_heavy_imports([str(script)])


def test_kill_bench_misses_its_bounds_on_a_late_loss_a_half_checkpoint_and_a_curve_that_differs(tmp_path: Path) -> None:
    from benches.kill import Ordeal, rows
    from benches.lives import Death

    def ordeal(difference: str | None, wrong: list[str], *deaths: Death) -> Ordeal:
        made = Ordeal([], RunDir(tmp_path), tmp_path, random.Random(1))
        made.lives = [SimpleNamespace(deaths=deaths, wrong_choices=wrong, difference=lambda: difference)]
        return made

    good = ordeal(None, [], Death("rank 1", 8, 8, 4), Death("everything", None, 11, 8))
    assert [row.holds for row in rows([good], [good], kills=4)] == [True] * 6
    late = ordeal(None, [], Death("rank 1", 8, 9, 4), Death("everything", None, 10, 8))
    assert [row.holds for row in rows([late], [late], kills=4)] == [True, True, True, True, False, True]
    bad = ordeal("step 9", ["step_00000004: half"], Death("everything", None, 17, 8))
    assert [row.holds for row in rows([bad], [bad], kills=4)] == [False] * 6


def test_one_bit_in_a_joined_curve_is_a_difference_and_a_time_is_none(tmp_path: Path) -> None:
    from benches.lives import Lives

    record = {"step": 1, "loss": 4.0, "lr": 0.0, "grad_norm": 1.0, "step_s": 0.1}
    place = SimpleNamespace(run=RunDir(tmp_path / "here"), reference=RunDir(tmp_path / "there"))
    for run, changed in ((place.reference, {}), (place.run, {"step_s": 0.2})):
        run.path.mkdir()
        run.metrics.write_text(json.dumps(record | changed) + "\n")
    assert Lives.difference(place) is None
    place.run.metrics.write_text(json.dumps(record | {"loss": math.nextafter(4.0, 5.0)}) + "\n")
    assert "4.000000000000001" in Lives.difference(place)
    place.run.metrics.write_text("")
    assert Lives.difference(place) == "0 records instead of 1"


def test_unknown_bench_lists_those_there_are() -> None:
    done = bench("nothing")
    assert done.returncode == 2
    assert {"plan", "loop", "start", "elastic", "save"} <= {line.split()[0] for line in done.stdout.splitlines()[1:]}
    assert "bare_loop" not in done.stdout and "save_rank" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loop", "pairs=many"], "pairs is a whole number, not 'many'"),
        (["loop", "pairs=0"], "pairs is at least 1"),
        (["loop", "quick"], "'quick' is no key=value; its own options: pairs, steps, skip"),
        (["loop", "steps=5", "skip=5"], "of 5 steps, 5 cannot be left out"),
        (["kill", "kills=3"], "kills is at least 4"),
        (["audit", "skip=3"], "3 steps are watched: skip=5 leaves them out"),
        (["start", "zero=stage9"], "launch.py refuses this request"),
        (["save", "millions=7"], "millions is one of 130, 300, 400, 1000, not 7"),
        (["elastic", "stage=0"], "stage is 1, 2 or 3, not 0"),
    ],
)
def test_wrong_request_measures_nothing(words: list[str], message: str) -> None:
    done = bench(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
