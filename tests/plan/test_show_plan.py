"""Claims about what mode=plan shows: the text is the committed one, JSON holds the same, the page needs no network.

Run by pytest; golden/plan_*.txt hold the texts, from the first line to the table of DeepSpeed's keys.
Must never depend on the machine's own memory or name.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from launcher import planning
from launcher.plan import ModelFacts, build_plan
from launcher.planner.candidates import ORDER
from launcher.planner.capacity import Capacity, Machine, capacity_of
from launcher.planning import Prospect
from launcher.report import left_out, report
from launcher.rundir import RunDir
from launcher.show_plan import show
from tests.plan import goldens
from tests.plan.asking import ROOT, composed, planned, refused, unmeasured

Cli = Callable[..., Any]
CARD = "plan.memory_bytes=24000000000"
SHOWN = (
    "mode=plan",
    "model=llama_1b",
    "precision=bf16",
    "run.dir=/runs/a",
    "plan.compare=true",
    "plan.scale=[4,12,64]",
)


def prospect(*overrides: str, capacity: Capacity | None = None) -> Prospect:
    """Of a request, on a machine that says nothing about itself."""
    plan = planned(*overrides)
    nothing = Machine(None, None)
    known = capacity or capacity_of(plan.config, plan.cluster, nothing)
    return Prospect(plan, nothing, known, unmeasured, None)


def figures(*overrides: str, capacity: Capacity | None = None) -> dict[str, Any]:
    return report(prospect(*overrides, capacity=capacity))


def text_of(capsys: pytest.CaptureFixture[str], found: Prospect) -> str:
    capsys.readouterr()
    sources: dict[str, str] = _Anything()
    show(found.plan, report(found), RunDir("/runs/a"), sources, [])
    return capsys.readouterr().out.partition("DeepSpeed  ")[0]


class _Anything(dict[str, str]):
    """A source for every key."""

    def __missing__(self, key: str) -> str:
        return "somewhere"


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("fits", (CARD, "zero=stage3", "offload=cpu", *SHOWN)),
        ("does_not_fit", ("plan.memory_bytes=6000000000", "zero=stage1", "train.global_batch_size=64", *SHOWN)),
        ("timed", ("hardware=h100_80g", "zero=stage3", "zeropp=hpz", *SHOWN)),
        ("unknown", ("zero=stage2", "mode=plan", "run.dir=/runs/a")),
    ],
)
def test_the_text_is_the_committed_one(
    name: str, overrides: tuple[str, ...], two_hosts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    goldens.compare(f"plan_{name}.txt", text_of(capsys, prospect(*two_hosts, *overrides)))


def test_no_line_of_a_table_is_cut_or_wrapped(two_hosts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, prospect(*two_hosts, CARD, *SHOWN))
    assert "…" not in text
    assert len(re.findall(r"zero=stage\d offload=\w+ ", text)) == 7


# --- what is said ----------------------------------------------------------------------------------------------------


def test_one_rank_is_told_that_no_stage_saves_memory() -> None:
    """deepspeedai/DeepSpeed#237."""
    textbook = {planned(f"zero=stage{stage}", "cluster.num_procs=1").estimate.textbook_bytes for stage in range(4)}
    assert len(textbook) == 1
    [line] = [text for text in figures("cluster.num_procs=1", CARD)["advice"] if "one rank" in text]
    assert "no stage saves memory" in line and "offload=cpu" in line
    assert not [text for text in figures(CARD)["advice"] if "one rank" in text]


def test_what_no_figure_holds_is_listed() -> None:
    """deepspeedai/DeepSpeed#4527."""
    unknown = "; ".join(figures(CARD)["not_included"])
    assert "activations" in unknown and "fetched ahead" in unknown and "torch" in unknown


def test_why_activations_are_not_known_is_said() -> None:
    """A model whose code looks at values cannot run without them."""
    plan = build_plan(composed(CARD), {}, lambda *asked: ModelFacts(None, None, "RuntimeError: no\nvalues"))
    [line] = [text for text in left_out(plan) if "activations" in text]
    assert line.endswith("could not be measured: RuntimeError: no values")
    assert not [text for text in left_out(planned(CARD)) if "could not" in text]


def test_checkpoints_are_counted_with_those_that_are_kept(two_hosts: tuple[str, ...], capsys: Any) -> None:
    """Positronic-Robotics/positronic#374."""
    request = (*two_hosts, "run.dir=/runs/a", "checkpoint.keep=10", "checkpoint.every=5")
    kept = figures(*request)["checkpoint"]
    one = planned(*request).estimate.checkpoint_bytes
    assert one is not None
    assert (kept["bytes"], kept["at_once"], kept["kept_bytes"]) == (one, 11, 11 * one)
    assert "11 at once (checkpoint.keep=10)" in text_of(capsys, prospect(*request))
    assert "GB on the file system of /runs/a, of each host that does not share it" in text_of(
        capsys, prospect(*request)
    )


def test_without_a_capacity_nothing_is_judged_and_that_is_said(two_hosts: tuple[str, ...]) -> None:
    found = figures(*two_hosts, "mode=plan", "plan.compare=true")
    assert (found["fits"], found["capacity"], found["problem"]) == (None, None, None)
    assert {row["lacks"] for row in found["compare"]} == {None}
    assert [text for text in found["advice"] if "plan.memory_bytes=BYTES" in text]


# --- comparisons -----------------------------------------------------------------------------------------------------


def test_a_comparison_holds_every_combination_or_why_it_is_none() -> None:
    rows = figures("mode=plan", CARD, "plan.compare=true")["compare"]
    assert len(rows) == len({tuple(row["overrides"]) for row in rows}) == 4 * 3 * 2
    for row in rows:
        if row["refused"]:
            assert row["refused"] == "; ".join(problem.why for problem in refused("mode=plan", *row["overrides"]))
        else:
            memory = planned("mode=plan", *row["overrides"]).estimate.memory
            assert memory is not None and row["peak_bytes"] == memory.peak.total_bytes
    accepted = [tuple(row["overrides"][:2]) for row in rows if not row["refused"]]
    order = [(f"zero={zero}", f"offload={offload}") for zero, offload in ORDER if offload != "nvme"]
    assert list(dict.fromkeys(accepted)) == order
    assert [row["overrides"] for row in rows if row["current"]] == [["zero=stage2", "offload=none", "activation=none"]]


def test_a_scale_is_the_same_request_on_other_ranks(two_hosts: tuple[str, ...]) -> None:
    request = (*two_hosts, "mode=plan", CARD, "zero=stage3")
    rows = figures(*request, "plan.scale=[4,8,16]")["scale"]
    assert [row["ranks"] for row in rows] == [4, 8, 16]
    memory = planned(*request).estimate.memory
    assert memory is not None and rows[1]["peak_bytes"] == memory.peak.total_bytes and rows[1]["current"]
    assert rows[0]["peak_bytes"] > rows[1]["peak_bytes"] > rows[2]["peak_bytes"]


def test_a_global_batch_that_other_ranks_cannot_make_is_said_in_their_row() -> None:
    rows = figures("mode=plan", CARD, "plan.scale=[2,3]", "train.global_batch_size=16")["scale"]
    assert rows[0]["refused"] is None and "not a multiple" in rows[1]["refused"]


# --- JSON and the page -----------------------------------------------------------------------------------------------


def test_json_holds_the_same_figures(cli: Cli) -> None:
    request = ("mode=plan", CARD, "plan.compare=true", "plan.scale=2,4")
    answer = cli(*request, "plan.format=json")
    assert (answer.code, answer.err) == (0, "")
    said = json.loads(answer.out)["report"]
    with planning.prospect(composed("mode=plan", CARD, "plan.compare=true", "plan.scale=[2,4]")) as found:
        assert said == json.loads(json.dumps(report(found)))


class _Page(HTMLParser):
    """Tags that are open, every tag seen, and every attribute that could load something."""

    VOID = ("meta", "rect", "line", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [name for name, _ in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(cli: Cli) -> None:
    answer = cli("mode=plan", CARD, "plan.compare=true", "plan.scale=2,4", "plan.html=p.html", 'model.name="<b>&x"')
    assert answer.code == 0 and "wrote" in answer.err
    text = Path("p.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert (page.open, page.loads) == ([], [])
    assert page.seen.count("svg") == 3
    assert not {"script", "link", "img", "iframe", "b"} & set(page.seen)
    assert "http" not in text and "url(" not in text and "&lt;b&gt;&amp;x" in text
    assert page.seen.count("rect") >= 4 + 16 + 2


def test_a_page_that_cannot_be_written_is_a_wrong_request(cli: Cli) -> None:
    answer = cli("mode=plan", "plan.html=none/p.html")
    assert answer.code == 2 and "plan.html" in answer.err


def test_brackets_of_the_user_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert "model    [red]x[/red]: " in text_of(capsys, prospect('model.name="[red]x[/red]"'))


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "launch.py"), "mode=plan"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 0
