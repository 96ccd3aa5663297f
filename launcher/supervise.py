"""Watches a started job: progress, the first failure, signals to us, and its end; leaves no process behind.

Called by `launcher.run`. Reads what workers write (`control/`, `metrics.jsonl`); signals only the job's own group.
Must never trust the front-end's exit code: without the result that rank 0 writes last, the job has failed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.errors import EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM, EXIT_TRAINING, Failure
from launcher.follow import Changes, Tail
from launcher.rundir import RunDir, read_json, try_write, write_text
from launcher.schema import WatchSection
from launcher.watchdog import Watchdog

POLL_S = 0.1
ABORT_GRACE_S = 3.0  # workers poll for the abort file once a second
FULL_DISK_BYTES = 500_000  # no checkpoint of anything fits, and hardly the records of a failure
FRONT_END_GRACE_S = 0.2  # once every rank is done
FRONT_END_REMOTE_GRACE_S = 5.0  # the shells on the other hosts end by themselves


@dataclass
class Ending:
    """How a job ended."""

    exit_code: int
    failure: Failure | None


@dataclass(frozen=True)
class Job:
    """What is started and how it is watched."""

    argv: list[str]
    environment: dict[str, str]
    folder: str | None
    """Working folder of the front-end; None: this process's."""
    run: RunDir
    rank_hosts: list[str]
    local: bool
    watch: WatchSection
    end_on_hosts: Callable[[], dict[str, str]]
    """Kills what is left of the job on other hosts; returns {host: what was seen instead} of those out of reach."""
    limit_s: float | None = None
    """Seconds after which the job is ended, whatever it does."""


def supervise(job: Job, on_metrics: Callable[[dict[str, Any]], None], on_status: Callable[[str], None]) -> Ending:
    """Starts the job in a session of its own and returns when it has ended and nothing of it is left on any host.

    `on_metrics` gets every object of metrics.jsonl, `on_status` every change of what the workers do, and findings.
    Exit code: 0 when rank 0 wrote its result, 130/143 when it was stopped by a signal to us, else 5.
    """
    run, tail, status = job.run, Tail(job.run.metrics), ""
    records, marks = Changes(job.run.metrics), Changes(job.run.control)
    first: Failure | None = None
    out_of_reach: dict[str, str] = {}
    stopped: int | None = None
    finished = aborted = left_alone = False
    watchdog = Watchdog(run, job.rank_hosts, job.watch)
    watchdog.beat()
    with run.launcher_log.open("ab") as log, _signals() as received:
        process = subprocess.Popen(
            job.argv,
            env=job.environment,
            cwd=job.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline: float | None = None
        latest = None if job.limit_s is None else time.monotonic() + job.limit_s
        try:
            while process.poll() is None or (first is None and _ranks_live(run, job, watchdog)):
                time.sleep(POLL_S)
                watchdog.beat()
                ended = process.poll() is not None
                if records.any() or ended:
                    for record in tail.read():
                        on_metrics(record)
                        _tell(watchdog.step(record), on_status)
                marked = marks.any() or ended
                if marked:
                    _tell(watchdog.measured(), on_status)
                    text = (read_json(run.status) or {}).get("text", "")
                    if text != status:
                        status = text
                        on_status(text)
                if received and stopped is None:
                    stopped = received[0]
                    try_write(write_text, run.stop_request, signal.Signals(stopped).name)
                    on_status(f"{signal.Signals(stopped).name}: stopping after this step, with a checkpoint")
                    deadline = time.monotonic() + job.watch.grace_s
                if ended and stopped is None and not left_alone and not _finished(run, len(job.rank_hosts)):
                    left_alone = True
                    try_write(write_text, run.stop_request, "the deepspeed launcher has ended")
                    on_status("the deepspeed launcher has ended: stopping after this step, with a checkpoint")
                    deadline = time.monotonic() + job.watch.grace_s
                if marked:
                    first = first or _first_failure(run, job.rank_hosts, job.local)
                    finished = _finished(run, len(job.rank_hosts))
                first = first or watchdog.stall()
                if latest is not None and time.monotonic() > latest and first is None:
                    first = Failure(None, None, f"no end after {job.limit_s:.0f} s", run.launcher_log, "limit")
                if first is not None and not aborted:
                    aborted = True
                    deadline = time.monotonic() + ABORT_GRACE_S
                    try_write(write_text, run.abort_request, first.message)
                finished = finished and first is None
                if finished and deadline is None:
                    deadline = time.monotonic() + (FRONT_END_GRACE_S if job.local else FRONT_END_REMOTE_GRACE_S)
                if len(received) > 1 or (deadline is not None and time.monotonic() > deadline):
                    break
        finally:
            ended_well = _end_group(process, run, finished)
            lost = None if ended_well else _lost_rank(run, job.rank_hosts)
            out_of_reach = {} if ended_well else job.end_on_hosts()
        for record in tail.read():
            on_metrics(record)
    if first is None or first.kind == "peer":
        first = _recorded_failure(run) or first
    if not run.result.exists() and (first is None or first.kind == "peer"):
        first = lost or first
    if first is not None and shutil.disk_usage(run.path).free < FULL_DISK_BYTES:
        first.message += f". No space left on device: the disk of {run.path} is full"
    if first is not None and out_of_reach:
        host, seen = next(iter(out_of_reach.items()))
        first.message += f". {', '.join(out_of_reach)} cannot be reached: {seen}"
        first.host = host if first.kind in ("stall", "peer", "launcher") else first.host
    return _ending(process.returncode, first, stopped, run)


def _tell(text: str | None, on_status: Callable[[str], None]) -> None:
    if text is not None:
        on_status(text)


def _ending(returncode: int | None, first: Failure | None, stopped: int | None, run: RunDir) -> Ending:
    finished = run.result.exists()
    if stopped is not None and finished:
        return Ending(EXIT_SIGINT if stopped == signal.SIGINT else EXIT_SIGTERM, None)
    if finished and first is None:
        if not (read_json(run.result) or {}).get("stopped"):
            return Ending(EXIT_OK, None)
        if not run.stop_request.exists() or returncode in (-signal.SIGTERM, -signal.SIGINT):
            return Ending(EXIT_SIGTERM, None)  # a signal that the ranks got and we did not
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


def _ranks_live(run: RunDir, job: Job, watchdog: Watchdog) -> bool:
    """Whether ranks go on although the front-end has ended: it was killed, and they were not."""
    if _finished(run, len(job.rank_hosts)):
        return False
    if not job.local:
        return watchdog.any_rank_beats()
    pids = [read_json(run.pid(rank)) for rank in range(len(job.rank_hosts)) if not run.done(rank).exists()]
    return any(entry and _alive(int(entry["pid"])) for entry in pids)


def _lost_rank(run: RunDir, rank_hosts: list[str]) -> Failure | None:
    """Of the ranks that started and left no word of their end, the one that was heard of least recently."""
    silent = {}
    for rank in range(len(rank_hosts)):
        ended = run.failure(rank).exists() or run.done(rank).exists() or run.left(rank).exists()
        if run.pid(rank).exists() and not ended:
            silent[rank] = (read_json(run.heartbeat(rank)) or {}).get("time", 0.0)
    if not silent:
        return None
    rank = min(silent, key=lambda candidate: silent[candidate])
    host = rank_hosts[rank]
    message = f"rank {rank} on {host} was killed, or its host was lost (no error of its own)"
    return Failure(rank, host, message, run.rank_log(host, rank), "killed")


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


def _end_group(process: subprocess.Popen[bytes], run: RunDir, finished: bool) -> bool:
    """Ends what is left of the job: the abort file for workers anywhere, then SIGKILL to its own process group.

    Returns whether the job had ended in order. Where every rank is done only the front-end is left: it takes seconds
    to leave, and tells nobody anything.
    """
    if process.poll() is None and not finished:
        if not run.abort_request.exists():
            try_write(write_text, run.abort_request, "the launcher ended the job")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ABORT_GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    return finished


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
