"""Time of `launch.py mode=plan` and `launch.py --help` over that of `deepspeed --help`: planning is instant.

`scripts/bench plan [pairs=7] [warm_up=1] [overrides]`; warm-up rounds fill the disk cache and are not counted.
Must never pass while torch, or anything as heavy, is loaded to plan.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

from benches.report import ROOT, Row, ratios
from benches.request import BenchError, Request
from benches.timing import base_environment, in_turn, run_to_end

OPTIONS = {"pairs": 7, "warm_up": 1}
AT_MOST = 0.35
HEAVY = {"torch", "deepspeed", "transformers", "numpy"}


def run(request: Request) -> list[Row]:
    """Two rows: planning and help, each over `deepspeed --help`."""
    launch, warm_up = str(ROOT / "launch.py"), request.options["warm_up"]
    ours = {"launch.py mode=plan": [launch, "mode=plan", *request.overrides], "launch.py --help": [launch, "--help"]}
    for command in ours.values():
        refuse_heavy_imports(command)
    commands = {name: [sys.executable, *words] for name, words in ours.items()}
    commands["deepspeed --help"] = [str(Path(sys.executable).parent / "deepspeed"), "--help"]
    with tempfile.TemporaryDirectory(prefix="zerolaunch-bench-") as folder:
        log, environment = Path(folder) / "output", base_environment()

        def measure(name: str) -> float:
            return run_to_end(commands[name], log, environment).seconds

        rounds = warm_up + request.options["pairs"]
        times = in_turn(rounds, {name: functools.partial(measure, name) for name in commands})
    times = {name: values[warm_up:] for name, values in times.items()}
    below = times["deepspeed --help"]
    return [
        Row(
            f"{name} over deepspeed --help",
            "ratio",
            ratios(times[name], below),
            at_most=AT_MOST,
            parts={f"{name}, s": times[name], "deepspeed --help, s": below},
        )
        for name in ours
    ]


def refuse_heavy_imports(words: list[str]) -> None:
    """Raises BenchError when the command loads one of HEAVY, by the interpreter's own list of imports."""
    argv = [sys.executable, "-X", "importtime", *words]
    answer = subprocess.run(argv, env=base_environment(), capture_output=True, text=True, check=False)
    if answer.returncode:
        raise BenchError(f"exit code {answer.returncode} of {' '.join(argv)}\n{answer.stderr[-2000:]}")
    lines = [line for line in answer.stderr.splitlines() if line.startswith("import time:")]
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "launcher" in loaded, "the interpreter's list of imports is not where it is looked for"
    if loaded & HEAVY:
        raise BenchError(f"{' '.join(words)} loads {', '.join(sorted(loaded & HEAVY))}")
