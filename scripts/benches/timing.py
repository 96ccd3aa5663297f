"""Commands -> measured runs, taken in turn, so that a slow spell of the machine meets every side alike.

Used by every bench.
Must never leave a process behind, nor go on after one failed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from benches.request import BenchError

T = TypeVar("T")
TIMEOUT_S = 3600.0
LAST_LINES = 25
WATCH_POLL_S = 0.02


@dataclass(frozen=True)
class Ran:
    """One command that ended well. `started`: seconds since the epoch; `rank_environment`: see `run_to_end`."""

    started: float
    seconds: float
    rank_environment: dict[str, str] | None


def in_turn(rounds: int, sides: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Results of each side, one per round: A B, B A, A B, ... (with three sides: A B C, B C A, C A B, ...)."""
    names = list(sides)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            print(f"· round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            found[name].append(sides[name]())
    return found


def base_environment() -> dict[str, str]:
    """This process's environment with the interpreter's folder first on PATH: torch looks for ninja there."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def run_to_end(argv: list[str], log: Path, environment: dict[str, str], watch: Path | None = None) -> Ran:
    """Runs `argv` with its output in `log`; raises BenchError with the last lines of it when it fails.

    `watch`: script of the ranks below it, of which the environment of rank 0 is wanted (this costs a little time).
    """
    started, clock = time.time(), time.perf_counter()
    process = launched(argv, log, environment)
    try:
        seen = environment_of_rank(process, watch) if watch is not None else None
        code = process.wait(TIMEOUT_S)
    except BaseException:
        kill_tree(process)
        raise
    seconds = time.perf_counter() - clock
    check_code(code, argv, log)
    return Ran(started, seconds, seen)


def launched(argv: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """`argv`, started with its output in `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )


def check_code(code: int, argv: list[str], log: Path) -> None:
    """Raises BenchError with the last lines of `log` unless `argv` ended well."""
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        raise BenchError("\n  | ".join([f"exit code {code} of {' '.join(argv)}", *lines]))


def environment_of_rank(process: subprocess.Popen[bytes], script: Path) -> dict[str, str] | None:
    """Environment of the descendant that runs `script` as rank 0; None when `process` ended before there was one."""
    top = psutil.Process(process.pid)
    while process.poll() is None:
        for child in descendants(top):
            with contextlib.suppress(psutil.Error):
                if str(script) in child.cmdline() and (found := child.environ()).get("RANK") == "0":
                    return dict(found)
        time.sleep(WATCH_POLL_S)
    return None


def descendants(top: psutil.Process) -> list[psutil.Process]:
    """Processes below `top`, at any depth."""
    try:
        return list(top.children(recursive=True))
    except psutil.Error:
        return []


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the process and all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        victims = descendants(psutil.Process(process.pid))
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
    process.kill()
    process.wait()
