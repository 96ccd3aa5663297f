"""The run-time audit finds every trap of the corpus at its line, nothing else, and leaves nothing behind.

Run by pytest; ranks are those of engine_server.py, the jobs those of tests/audit_corpus.
Must never take a finding near the trap for one at it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher import attempts
from launcher.errors import EXIT_TRAINING, Failure
from launcher.rundir import RunDir, read_json
from launcher.supervise import Ending
from tests.plan.asking import ROOT, planned
from tests.plan.corpus import CLEAN, TRAPS, marked
from tests.train.engines import Engines, request

RUN = ("run.steps=2", "eval.samples=2", "checkpoint.every=0", "model.config.vocab_size=256")
PARTS = 6  # of the corpus: each takes a few seconds in one pair of ranks


def found(engines: Engines, jobs: list[str]) -> dict[str, Any]:
    """What the audit found in each job."""
    answer = engines.call("tests.train.audit_ranks:corpus", 2, jobs=jobs)
    assert "error" not in answer, answer["error"] + answer["log"]
    return dict(answer["jobs"])


@pytest.mark.parametrize("part", range(PARTS))
def test_every_trap_is_found_at_its_line_and_nothing_else(engines: Engines, part: int) -> None:
    """Of public reports: deepspeedai/DeepSpeed#930, #1416, #1767, #4064, #6793, #7998, #8297, OpenRLHF/OpenRLHF#1357,
    snowflakedb/ArcticTraining#265, huggingface/accelerate#1261; each job names its own."""
    jobs = TRAPS[part::PARTS]
    answers = found(engines, jobs)
    assert len(TRAPS) >= 30 and sorted(answers) == sorted(jobs)
    for job, answer in answers.items():
        lines = {(finding["file"], finding["line"], finding["kind"]) for finding in answer["found"]}
        assert lines == {(str(path), line, kind) for path, line, kind in marked(job)}, job
        assert all(finding["parameter"] and finding["fix"] for finding in answer["found"])


@pytest.mark.parametrize("part", range(PARTS))
def test_clean_jobs_run_without_a_finding(engines: Engines, part: int) -> None:
    jobs = CLEAN[part::PARTS]
    answers = found(engines, jobs)
    assert len(CLEAN) >= 30 and sorted(answers) == sorted(jobs)
    assert {job: answer for job, answer in answers.items() if answer["found"] or answer["error"]} == {}


def test_strict_ends_with_the_first_finding(engines: Engines) -> None:
    answer = engines.call("tests.train.audit_ranks:strict", 2, job="traps.norm_in_log")
    ((path, line, _),) = marked("traps.norm_in_log")
    assert answer["ended"].startswith(f"UserError: {path}:{line}: is read outside a gather")
    assert answer["installed"]["modes"] == 0


def test_the_audit_takes_itself_away_after_its_steps(engines: Engines) -> None:
    answer = engines.call("tests.train.audit_ranks:taken_away", 2)
    assert "error" not in answer, answer["error"] + answer["log"]
    assert answer["after"] == answer["before"]
    different = {key for key, value in answer["during"].items() if value != answer["before"][key]}
    assert different == {"modes", "initialize", "gathers", "registration", "optimizers"}
    watched, left = answer["hooks"]
    assert watched > left and answer["left"] == []
    watching, afterwards = answer["threads"]
    assert watching == afterwards + 1


def test_a_rank_that_does_not_come_is_named_in_time(engines: Engines) -> None:
    """deepspeedai/DeepSpeed#7998: such a run hangs; here it ends, and says where each rank stands."""
    answer = engines.call("tests.train.audit_ranks:alone", 2)
    assert "error" not in answer, answer["error"] + answer["log"]
    assert "ranks [1] did not come within 2 s" in answer["said"] and "has not begun" in answer["said"]


def test_a_rank_that_is_lost_is_not_said_to_be_late(engines: Engines, tmp_path: Path) -> None:
    """The launcher blames the first rank that fails for reasons of its own: what follows has to be told from it."""
    answer = engines.call("tests.train.audit_ranks:lost", 2, file=str(tmp_path / "kind"))
    assert answer["error"] == "died without an answer" and answer["rank"] == 1
    assert (tmp_path / "kind").read_text() == "peer"


def test_the_corpus_is_where_the_tests_look() -> None:
    files = {
        path.relative_to(ROOT / "tests" / "audit_corpus") for path in (ROOT / "tests" / "audit_corpus").rglob("*.py")
    }
    assert len(files) == len(TRAPS) + len(CLEAN) + 3  # and three __init__.py


@pytest.mark.parametrize(("zero", "audit"), [("stage3", "warn"), ("stage3", "off"), ("stage2", "warn")])
def test_a_run_of_our_own_has_no_finding(engines: Engines, tmp_path: Path, zero: str, audit: str) -> None:
    """At stage 3 audit.json says what was watched; with audit=off, or below, there is none.

    deepspeedai/DeepSpeed#6793: two micro-batches a step, and the loop enters no no_sync.
    """
    accumulated = ("train.gradient_accumulation_steps=2", "train.micro_batch_size=1")
    plan = planned(*request(f"zero={zero}", f"audit={audit}", "audit.steps=1", *accumulated, *RUN))
    engines.run_recipe(plan, tmp_path / "run")
    written = read_json(RunDir(tmp_path / "run").audit)
    if (zero, audit) == ("stage3", "warn"):
        assert written == {"mode": "warn", "steps": 1, "findings": []}
    else:
        assert written is None


def test_a_finding_in_our_own_recipe_ends_a_strict_run_and_is_written(engines: Engines, tmp_path: Path) -> None:
    """A recipe whose model is asked for its norm: the launcher's summary counts what audit.json holds."""
    plan = planned(*request("zero=stage3", "audit=strict", *RUN))
    run = RunDir(tmp_path / "run")
    run.create()
    answer = engines.call("tests.train.audit_ranks:recipe_with_a_trap", 2, plan=plan.to_json(), run_dir=str(run.path))
    written = read_json(run.audit)
    assert written["mode"] == "strict" and [finding["kind"] for finding in written["findings"]] == ["read"]
    assert written["findings"][0]["file"] == str(ROOT / "tests" / "train" / "audit_ranks.py")
    assert answer["ended"] == [f"{written['findings'][0]['file']}:{written['findings'][0]['line']}", EXIT_TRAINING]
    ending = Ending(EXIT_TRAINING, Failure(0, "here", "it ended", run.rank_log("here", 0)))
    assert attempts.end(run, plan, ending, 1)["audit_findings"] == 1
