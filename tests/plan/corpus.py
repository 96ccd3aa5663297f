"""The jobs of tests/audit_corpus, and the lines of theirs that an audit has to find.

Used by the tests of both audits.
Must never import a job: planning loads no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.plan.asking import ROOT

FOLDER = ROOT / "tests" / "audit_corpus"
TRAPS, CLEAN = (
    [f"{kind}.{path.stem}" for path in sorted((FOLDER / kind).glob("[!_]*.py"))] for kind in ("traps", "clean")
)


def path_of(job: str) -> Path:
    """Its file."""
    return FOLDER / f"{job.replace('.', '/')}.py"


def marked(job: str) -> list[tuple[Path, int, str]]:
    """(file, line, kind) of each line that ends in `# trap: KIND`."""
    lines = path_of(job).read_text(encoding="utf-8").splitlines()
    marks = ((number, re.search(r"# trap: (\w+)$", line)) for number, line in enumerate(lines, 1))
    return [(path_of(job), number, mark[1]) for number, mark in marks if mark]
