"""Reading sources finds most traps of the corpus, at their lines, and seldom accuses what is right.

Run by pytest; the jobs are those of tests/audit_corpus.
Must never count a finding near a trap as one at it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.audit.scan import scan
from launcher.cli import main
from launcher.errors import EXIT_OK, EXIT_REQUEST, UserError
from tests.plan.asking import ROOT
from tests.plan.corpus import CLEAN, TRAPS, marked, path_of

CAUGHT = 0.8  # of the traps, at the marked line
ACCUSED = 0.05  # of the clean jobs


def lines(job: str) -> set[tuple[int, str]]:
    return {(finding.line, finding.kind) for finding in scan(str(path_of(job)))[1]}


def test_most_traps_are_found_at_their_line() -> None:
    missed = [job for job in TRAPS if not {(line, kind) for _, line, kind in marked(job)} <= lines(job)]
    assert len(TRAPS) >= 30 and len(missed) <= (1 - CAUGHT) * len(TRAPS), missed


def test_clean_jobs_are_seldom_accused() -> None:
    accused = {job: sorted(lines(job)) for job in CLEAN if lines(job)}
    assert len(CLEAN) >= 30 and len(accused) <= ACCUSED * len(CLEAN), accused


def test_jobs_with_a_trap_are_accused_of_nothing_else() -> None:
    marks = {job: {line for _, line, _ in marked(job)} for job in TRAPS}
    other = {job: wrong for job in TRAPS if (wrong := [hit for hit in lines(job) if hit[0] not in marks[job]])}
    assert len(other) <= ACCUSED * len(TRAPS), other


def test_the_products_own_jobs_are_clean() -> None:
    found = [scan(str(path))[1] for path in sorted((ROOT / "recipes").glob("*.py"))]
    assert len(found) > 3 and not any(found)


def test_mode_audit_prints_what_it_found_and_says_so_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    trap, clean = path_of("traps.norm_in_log"), path_of("clean.norm_by_gather")
    assert main(["mode=audit", f"audit.path={trap}", "audit.format=json"]) == EXIT_REQUEST
    printed = json.loads(capsys.readouterr().out)
    assert printed["files"] == 1
    ((_, line, kind),) = marked("traps.norm_in_log")
    assert [(hit["file"], hit["line"], hit["kind"]) for hit in printed["findings"]] == [(str(trap), line, kind)]
    assert main(["mode=audit", f"audit.path={trap}"]) == EXIT_REQUEST
    assert f"norm_in_log.py:{line}" in capsys.readouterr().out
    assert main(["mode=audit", f"audit.path={clean}"]) == EXIT_OK
    assert main(["mode=audit", f"audit.path={clean}", "audit.format=xml"]) == EXIT_REQUEST


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reads a file or folder"):
        scan(None)
    with pytest.raises(UserError, match="no such file"):
        scan(str(tmp_path / "absent.py"))
    with pytest.raises(UserError, match="no Python file"):
        scan(str(tmp_path))
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(UserError, match="no Python of this version"):
        scan(str(tmp_path))
