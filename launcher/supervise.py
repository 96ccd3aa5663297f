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
from types import FrameType
from typing import Any

from launcher import marks
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
    run = job.run
    with run.launcher_log.open("ab") as log, _signals() as received:
        watched = _Watched(job, received, on_metrics, on_status)
        process = subprocess.Popen(
            job.argv,
            env=job.environment,
            cwd=job.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            watched.follow(process)
        finally:
            in_order = _end_group(process, run, watched.finished)
            lost = None if in_order else marks.lost_rank(run, job.rank_hosts)
            out_of_reach = {} if in_order else job.end_on_hosts()
        watched.last_records()
    first = watched.failure
    if first is None or first.kind == "peer":
        first = marks.recorded_failure(run) or first
    if not run.result.exists() and (first is None or first.kind == "peer"):
        first = lost or first
    if first is not None and shutil.disk_usage(run.path).free < FULL_DISK_BYTES:
        first.message += f". No space left on device: the disk of {run.path} is full"
    if first is not None and out_of_reach:
        host, seen = next(iter(out_of_reach.items()))
        first.message += f". {', '.join(out_of_reach)} cannot be reached: {seen}"
        first.host = host if first.kind in ("stall", "peer", "launcher") else first.host
    return _ending(process.returncode, first, watched.stopped, run)


class _Watched:
    """A job while it runs: what is known of it, and when the wait for it is over. Made before it is started."""

    def __init__(
        self,
        job: Job,
        received: list[int],
        on_metrics: Callable[[dict[str, Any]], None],
        on_status: Callable[[str], None],
    ) -> None:
        self.job, self.run, self.received = job, job.run, received
        self.on_metrics, self.on_status = on_metrics, on_status
        self.tail, self.status = Tail(job.run.metrics), ""
        self.records, self.changes = Changes(job.run.metrics), Changes(job.run.control)
        self.watchdog = Watchdog(job.run, job.rank_hosts, job.watch)
        self.failure: Failure | None = None
        """The first."""
        self.stopped: int | None = None
        """The signal to us that the job was asked to stop for."""
        self.finished = False
        """Every rank is done and none has failed."""
        self.aborted = self.left_alone = False
        self.deadline: float | None = None
        self.latest = None if job.limit_s is None else time.monotonic() + job.limit_s
        self.watchdog.beat()

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Returns once the job has ended, or is not waited for any longer."""
        while process.poll() is None or (self.failure is None and self._ranks_live()):
            time.sleep(POLL_S)
            self.watchdog.beat()
            ended = process.poll() is not None
            marked = self.changes.any() or ended
            if self.records.any() or ended:
                self._hear()
            if marked:
                self._show()
            self._ask_to_stop(ended)
            self._judge(marked)
            if len(self.received) > 1 or (self.deadline is not None and time.monotonic() > self.deadline):
                return

    def last_records(self) -> None:
        """What was written up to the end."""
        for record in self.tail.read():
            self.on_metrics(record)

    def _ranks_live(self) -> bool:
        """Whether ranks go on although the front-end has ended: it was killed, and they were not."""
        if marks.finished(self.run, len(self.job.rank_hosts)):
            return False
        if not self.job.local:
            return self.watchdog.any_rank_beats()
        return marks.any_process_lives(self.run, len(self.job.rank_hosts))

    def _hear(self) -> None:
        for record in self.tail.read():
            self.on_metrics(record)
            self._tell(self.watchdog.step(record))

    def _show(self) -> None:
        self._tell(self.watchdog.measured())
        text = (read_json(self.run.status) or {}).get("text", "")
        if text != self.status:
            self.status = text
            self.on_status(text)

    def _tell(self, text: str | None) -> None:
        if text is not None:
            self.on_status(text)

    def _ask_to_stop(self, ended: bool) -> None:
        """Ranks finish their step and save: at our first signal, and when the front-end (`ended`) has left them."""
        if self.received and self.stopped is None:
            self.stopped = self.received[0]
            self._request_stop(signal.Signals(self.stopped).name)
        alone = ended and self.stopped is None and not self.left_alone
        if alone and not marks.finished(self.run, len(self.job.rank_hosts)):
            self.left_alone = True
            self._request_stop("the deepspeed launcher has ended")

    def _request_stop(self, why: str) -> None:
        try_write(write_text, self.run.stop_request, why)
        self.on_status(f"{why}: stopping after this step, with a checkpoint")
        self.deadline = time.monotonic() + self.job.watch.grace_s

    def _judge(self, marked: bool) -> None:
        """Whether the job has failed, and then has it aborted, or is done. `marked`: ranks may have left something."""
        job, run = self.job, self.run
        if marked:
            self.failure = self.failure or marks.first_failure(run, job.rank_hosts, job.local)
            self.finished = marks.finished(run, len(job.rank_hosts))
        self.failure = self.failure or self.watchdog.stall()
        if self.latest is not None and time.monotonic() > self.latest and self.failure is None:
            self.failure = Failure(None, None, f"no end after {job.limit_s:.0f} s", run.launcher_log, "limit")
        if self.failure is not None and not self.aborted:
            self.aborted = True
            self.deadline = time.monotonic() + ABORT_GRACE_S
            try_write(write_text, run.abort_request, self.failure.message)
        self.finished = self.finished and self.failure is None
        if self.finished and self.deadline is None:
            self.deadline = time.monotonic() + (FRONT_END_GRACE_S if job.local else FRONT_END_REMOTE_GRACE_S)


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
