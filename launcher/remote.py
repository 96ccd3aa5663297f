"""Runs a script of ours on many hosts at once, over ssh or srun, and brings its answers back.

Called by `launcher.check`, `run` and `leftovers`; with `run` and `supervise` the only starter of processes.
Must never send more than one constant line through a remote shell: script and request travel on stdin.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from launcher import env
from launcher.cluster.preflight import Answer
from launcher.onhost.probe import MARK
from launcher.schema import ClusterSection

AT_ONCE = 64  # connections that are being opened at a time
CONNECT_S = 8
BOOTSTRAP = "import sys;exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"


@dataclass(frozen=True)
class Reach:
    """How a command gets onto a host."""

    section: ClusterSection
    local: bool

    def argv(self, host: str, command: Sequence[str]) -> list[str]:
        """Argument list that runs `command` on `host`, without a prompt."""
        if self.local:
            return list(command)
        if self.section.launcher == "slurm":
            return ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--quiet", *command]
        port = ["-p", str(self.section.ssh_port)] if self.section.ssh_port else []
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", *env.pdsh_ssh_arguments(), *port]
        return ["ssh", *options, host, shlex.join(command)]


def run_script(
    reach: Reach, hosts: Sequence[str], script: Path, requests: Sequence[dict[str, Any]], timeout_s: float, answers: int
) -> list[Answer]:
    """`main(request)` of `script` on every host, each with its own request; one Answer a host, in the same order.

    A script prints its answers with `say`; the first is its clock, the last its facts. It may go on, with stdin
    open, until every host has answered. A host that takes longer than `timeout_s` is one that did not answer.
    """
    source = script.read_text(encoding="utf-8")
    open_ends: list[subprocess.Popen[bytes]] = []

    def ask(host: str, request: dict[str, Any]) -> Answer:
        return _ask(
            reach.argv(host, [sys.executable, "-u", "-c", BOOTSTRAP]),
            host,
            source,
            request,
            timeout_s,
            answers,
            open_ends,
        )

    try:
        with ThreadPoolExecutor(min(AT_ONCE, len(hosts))) as pool:
            return list(pool.map(ask, hosts, requests))
    finally:
        for process in open_ends:
            _close(process)


def _ask(
    argv: list[str],
    host: str,
    source: str,
    request: dict[str, Any],
    timeout_s: float,
    answers: int,
    open_ends: list[subprocess.Popen[bytes]],
) -> Answer:
    started = time.monotonic()
    payload = f"{source}\nmain(json.loads({json.dumps(request)!r}))\n".encode()
    try:
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        return Answer(host, None, f"{argv[0]}: {error.strerror}", 0.0, 0.0)
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    errors: list[bytes] = []
    reader = threading.Thread(target=lambda: errors.append(_rest(process.stderr)), daemon=True)
    reader.start()
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{len(payload)}\n".encode() + payload)
        process.stdin.flush()
    found: list[Any] = []
    skew = 0.0
    while len(found) < answers and (line := process.stdout.readline()):
        text = line.decode(errors="replace")
        if text.startswith(MARK):
            found.append(json.loads(text[len(MARK) :]))
            if len(found) == 1 and "time" in found[0]:
                skew = found[0]["time"] - time.time()
    seconds = time.monotonic() - started
    if len(found) == answers:
        timer.cancel()
        open_ends.append(process)
        return Answer(host, found[-1], "", skew, seconds)
    late = seconds >= timeout_s
    _close(process)
    timer.cancel()
    reader.join(1)
    said = b"".join(errors).decode(errors="replace").strip().splitlines()
    what = f"timed out after {timeout_s:.0f} s" if late else said[-1] if said else f"exit code {process.returncode}"
    return Answer(host, None, what, 0.0, seconds)


def _rest(stream: IO[bytes] | None) -> bytes:
    return stream.read() if stream is not None else b""


def _close(process: subprocess.Popen[bytes]) -> None:
    """Ends a script that may still wait on stdin."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
