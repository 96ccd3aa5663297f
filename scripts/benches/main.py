"""Command line -> one bench's rows: a table for people, then one JSON object per row.

Called by scripts/bench. A bench is a file of this folder with `OPTIONS` (name -> default, whole numbers) and `run`.
Must never need a list of benches: a new one is a new file.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import shlex
import sys
from pathlib import Path

from benches import report
from benches.request import BenchError, Request, parse

FOLDER = Path(__file__).resolve().parent
EXIT_BOUNDS_HOLD, EXIT_BOUND_MISSED, EXIT_NOT_MEASURED = 0, 1, 2
BUSY_LOAD = 0.5  # mean number of running processes in the last minute; an idle machine is under 0.1


def main(arguments: list[str]) -> int:
    """Runs the bench that `arguments` names. 0: every bound holds; 1: one is missed; 2: nothing was measured."""
    known = discover()
    if not arguments or arguments[0] not in known:
        print("usage: scripts/bench NAME [key=value ...]", *(f"  {n:9} {known[n]}" for n in known), sep="\n")
        return EXIT_NOT_MEASURED
    bench = importlib.import_module(f"benches.{arguments[0]}")
    machine = report.hardware()
    if machine["load_average"] > BUSY_LOAD:
        note(f"this machine is busy (load {machine['load_average']}): the figures below are no numbers of record")
    try:
        request = parse(arguments[1:], bench.OPTIONS)
        rows: list[report.Row] = bench.run(request)
    except BenchError as error:
        print(f"bench {arguments[0]}: {error}", file=sys.stderr)
        return EXIT_NOT_MEASURED
    print(report.table(rows))
    circumstances = report.circumstances(shlex.join(["scripts/bench", *arguments]), machine)
    for row in rows:
        print(json.dumps({"bench": arguments[0]} | row.to_json() | settings(request) | circumstances))
    return EXIT_BOUNDS_HOLD if all(row.holds for row in rows) else EXIT_BOUND_MISSED


def discover() -> dict[str, str]:
    """{name: first line of its docstring} of every bench, found without importing any."""
    found = {}
    for file in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[file.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def settings(request: Request) -> dict[str, object]:
    """The bench's options as they were in force, and what was overridden."""
    return {"options": request.options, "overrides": request.overrides, "cpus": len(os.sched_getaffinity(0))}


def note(text: str) -> None:
    """One line about what happens now, on stderr: stdout ends in JSON."""
    print(f"· {text}", file=sys.stderr, flush=True)
