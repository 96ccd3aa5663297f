"""Watches a started job: progress, the first failure, signals to us, and its end; leaves no process behind.

Called by `launcher.run`. Reads what workers write (`control/`, `metrics.jsonl`); signals only the job's own group.
Must never trust the front-end's exit code: without the result that rank 0 writes last, the job has failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.errors import EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM, EXIT_TRAINING
from launcher.rundir import RunDir, read_json, write_text

POLL_S = 0.1
ABORT_GRACE_S = 3.0  # workers poll for the abort file once a second
FRONT_END_GRACE_S = 0.2  # once every rank is done
STOP_GRACE_S = 120.0  # a stop request ends at a step boundary, after a checkpoint


@dataclass
class Failure:
    """The first failing rank as far as it can be told: its log holds the rest."""

    rank: int | None
    host: str | None
    message: str
    log: Path
    kind: str = "error"


@dataclass
class Ending:
    """How a job ended."""

    exit_code: int
    failure: Failure | None


class Tail:
    """New complete lines of a growing file, as JSON values."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """Objects appended since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


def supervise(
    argv: list[str],
    environment: dict[str, str],
    run: RunDir,
    rank_hosts: list[str],
    local: bool,
    on_metrics: Callable[[dict[str, Any]], None],
    on_status: Callable[[str], None],
) -> Ending:
    """Starts `argv` in its own session and returns when it has ended and its group is gone.

    `on_metrics` gets every object of metrics.jsonl, `on_status` every change of control/status.json's text.
    Exit code: 0 when rank 0 wrote its result, 130/143 when it was stopped by a signal to us, else 5.
    """
    tail, status, first, stopped, finished = Tail(run.metrics), "", None, None, False
    with run.launcher_log.open("ab") as log, _signals() as received:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline: float | None = None
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                for record in tail.read():
                    on_metrics(record)
                text = (read_json(run.status) or {}).get("text", "")
                if text != status:
                    status = text
                    on_status(text)
                if received and stopped is None:
                    stopped = received[0]
                    write_text(run.stop_request, signal.Signals(stopped).name)
                    on_status(f"{signal.Signals(stopped).name}: stopping after this step, with a checkpoint")
                    deadline = time.monotonic() + STOP_GRACE_S
                first = first or _first_failure(run, rank_hosts, local)
                if first is not None and deadline is None:
                    deadline = time.monotonic() + ABORT_GRACE_S
                    write_text(run.abort_request, first.message)
                finished = first is None and _finished(run, len(rank_hosts))
                if finished and deadline is None:
                    deadline = time.monotonic() + (FRONT_END_GRACE_S if local else STOP_GRACE_S)
                if len(received) > 1 or (deadline is not None and time.monotonic() > deadline):
                    break
        finally:
            _end_group(process, run, finished)
        for record in tail.read():
            on_metrics(record)
    if first is None or first.kind == "peer":
        first = _recorded_failure(run) or first
    return _ending(process.returncode, first, stopped, run)


def _ending(returncode: int | None, first: Failure | None, stopped: int | None, run: RunDir) -> Ending:
    finished = run.result.exists()
    if stopped is not None and finished:
        return Ending(EXIT_SIGINT if stopped == signal.SIGINT else EXIT_SIGTERM, None)
    if finished and first is None:
        return Ending(EXIT_OK, None)
    if first is None:
        what = "was stopped before it could write a checkpoint" if stopped else "ended without a result"
        first = Failure(
            None, None, f"the deepspeed launcher {what} (exit code {returncode})", run.launcher_log, "launcher"
        )
    if stopped is not None:
        return Ending(EXIT_SIGINT if stopped == signal.SIGINT else EXIT_SIGTERM, first)
    return Ending(EXIT_TRAINING, first)


def _first_failure(run: RunDir, rank_hosts: list[str], local: bool) -> Failure | None:
    """The earliest failure record, else (on this machine) a rank whose process is gone without a result."""
    recorded = _recorded_failure(run)
    if (recorded is not None and recorded.kind != "peer") or not local or run.result.exists():
        return recorded
    for rank, host in enumerate(rank_hosts):
        entry = read_json(run.pid(rank))
        ended = run.failure(rank).exists() or run.done(rank).exists()
        if entry and not ended and not _alive(int(entry["pid"])):
            message = f"rank {rank} on {host} was killed (no error of its own)"
            return Failure(rank, host, message, run.rank_log(host, rank), "killed")
    return recorded


def _recorded_failure(run: RunDir) -> Failure | None:
    """The earliest record that a failing rank left; records of ranks that only lost a peer count last."""
    entries = [read_json(path) for path in run.failures()]
    entries = [entry for entry in entries if entry]
    if not entries:
        return None
    entry = min(entries, key=lambda e: (e.get("kind") == "peer", e["time"]))
    return Failure(
        entry["rank"],
        entry["host"],
        entry["message"],
        run.rank_log(entry["host"], entry["rank"]),
        entry.get("kind", "error"),
    )


def _alive(pid: int) -> bool:
    """Whether process `pid` of this machine exists and is not a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def _finished(run: RunDir, world_size: int) -> bool:
    """Whether rank 0 has written the result and every rank has come to its end."""
    return run.result.exists() and len(run.done_ranks()) == world_size


def _end_group(process: subprocess.Popen[bytes], run: RunDir, finished: bool) -> None:
    """Ends what is left of the job: the abort file for workers anywhere, then SIGKILL to its own process group.

    Where every rank is done only the front-end is left: it takes seconds to leave, and tells nobody anything.
    """
    if process.poll() is None and not finished:
        if not run.abort_request.exists():
            write_text(run.abort_request, "the launcher ended the job")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ABORT_GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them; restores the handlers afterwards."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
