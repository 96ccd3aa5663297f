"""Rewrites the file table of README.md from the first docstring line of each file that git knows.

Run by hand when files come or go: `python scripts/readme_files.py`; a test fails when the table is out of date.
Must never touch anything outside its two markers.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- files: scripts/readme_files.py -->", "<!-- end of files -->"
OTHERS = {
    "conf/": "the Hydra groups: one folder each, one file per choice",
    "hostfiles/example": "a hostfile to copy",
    "scripts/run": "set-up, then launch.py with the same arguments",
    "scripts/test": "set-up, then ruff, mypy and pytest; .ci/run calls it",
    "scripts/setup.sh": "makes .venv, installs pinned dependencies, compiles operators once",
    "scripts/lock": "regenerates constraints.txt",
    "scripts/make_tiny_chat": "makes a tiny tokenizer, base model and instruction set: `scripts/make_tiny_chat FOLDER`",
    "scripts/bench": "the benches behind docs/numbers.md: `scripts/bench NAME`",
    "scripts/testcluster": "makes SSH hosts in network namespaces on this machine",
    "tests/plan/": "the control plane, without torch in the process",
    "tests/run/": "real command lines, stand-in workers",
    "tests/train/": "real runs on CPU: parity, resume, export, signals",
    "tests/cluster/": "real SSH hosts in network namespaces",
}


def table() -> str:
    """The table: every Python file outside tests, then the files and folders of OTHERS."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    rows = ["| file | what it is |", "| --- | --- |"]
    for path in listed:
        if path.endswith(".py") and not path.startswith("tests/") and (ROOT / path).stat().st_size:
            rows.append(f"| `{path}` | {_first_line(ROOT / path)} |")
    rows += [f"| `{path}` | {what} |" for path, what in OTHERS.items()]
    return "\n".join(rows)


def updated(text: str) -> str:
    """README text with the table between the markers replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n")[0].rstrip(".").replace("|", "\\|")


def main() -> int:
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
