"""Sees that a started job gets on: heartbeats, stalls and what every rank does in one, steps that become slow.

Called by `launcher.supervise` in its loop. Reads and writes control files of the run; starts nothing.
Must never take slow for stuck: only a rank 0 that has not moved at all for `watch.stall_s` is a stall.
"""

from __future__ import annotations

import collections
import json
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

from launcher.errors import Failure
from launcher.rundir import RunDir, overwrite, read_json, start_time, try_write, write_text
from launcher.schema import WatchSection

BEAT_S = 1.0
LOOK_S = 2.0
BEAT_PATIENCE_S = 8.0  # ranks beat every two seconds
DUMP_WAIT_S = 5.0  # ranks look for the request once a second and beat every two
START_FACTOR = 3.0  # before the first step: models are built, operators loaded
BASELINE, RECENT, AGAIN = 20, 10, 200  # steps
SLOW_HOST = 1.3  # times the median of all ranks
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)', re.MULTILINE)
_LIBRARIES = ("/torch/", "/deepspeed/", "/lib/python")


class Watchdog:
    """The watch over one attempt of a run."""

    def __init__(self, run: RunDir, rank_hosts: list[str], section: WatchSection) -> None:
        self.run, self.rank_hosts, self.section = run, rank_hosts, section
        self.started = start_time(os.getpid())
        self.beats, self.beaten, self.looked = 0, 0.0, 0.0
        self.moves, self.moved, self.stepped = -1, time.monotonic(), False
        self.asked: float | None = None
        self.before: dict[int, Any] = {}
        self.last_beats: dict[int, Any] = {}
        self.last_beat = time.monotonic()
        self.times: collections.deque[float] = collections.deque(maxlen=RECENT)
        self.first_times: list[float] = []
        self.measured_at = -AGAIN

    def beat(self) -> None:
        """Shows the ranks that the launcher lives."""
        if time.monotonic() - self.beaten < BEAT_S:
            return
        self.beaten = time.monotonic()
        self.beats += 1
        sign = {"pid": os.getpid(), "started": self.started, "beat": self.beats}
        try_write(overwrite, self.run.launcher_beat, json.dumps(sign))

    def stall(self) -> Failure | None:
        """The failure of a job that stands still, once every rank has had time to show its stacks."""
        now = time.monotonic()
        if self.asked is not None:
            return diagnose(self.run, self.rank_hosts, self.before, self._limit()) if now > self.asked else None
        if now - self.looked < LOOK_S:
            return None
        self.looked = now
        position = read_json(self.run.heartbeat(0)) or {}
        if position.get("moves", -1) != self.moves:
            self.moves, self.moved = position.get("moves", -1), now
            self.stepped = self.stepped or position.get("step", 0) > 0
        if now - self.moved > self._limit():
            self.before = heartbeats(self.run, len(self.rank_hosts))
            self.asked = now + DUMP_WAIT_S
            try_write(write_text, self.run.dump_request, "no progress")
        return None

    def any_rank_beats(self) -> bool:
        """Whether any heartbeat has changed in the last BEAT_PATIENCE_S seconds, or is looked at for the first time."""
        now = time.monotonic()
        beats = heartbeats(self.run, len(self.rank_hosts))
        if beats != self.last_beats:
            self.last_beats, self.last_beat = beats, now
        return now - self.last_beat < BEAT_PATIENCE_S

    def step(self, record: dict[str, Any]) -> str | None:
        """Takes one object of metrics.jsonl; asks for a measurement when steps have become slow."""
        if "step_s" not in record:
            return None
        self.times.append(record["step_s"])
        if len(self.first_times) < BASELINE:
            self.first_times.append(record["step_s"])
            return None
        usual, now = statistics.median(self.first_times[2:]), statistics.median(self.times)
        if now > self.section.slow_factor * usual and record["step"] - self.measured_at >= AGAIN:
            self.measured_at = record["step"]
            try_write(write_text, self.run.measure_request, "steps have become slow")
            return f"step {record['step']}: a step takes {now:.2f} s, it was {usual:.2f} s; measuring every rank"
        return None

    def measured(self) -> str | None:
        """What came of a measurement, once: the host that is slow, or that none is."""
        found = read_json(self.run.measured)
        if found is None:
            return None
        self.run.measured.unlink(missing_ok=True)
        return slow_hosts(found["seconds"], self.rank_hosts)

    def _limit(self) -> float:
        return self.section.stall_s * (1 if self.stepped else START_FACTOR)


def slow_hosts(seconds: list[float], rank_hosts: list[str]) -> str:
    """Names the hosts whose slowest rank takes SLOW_HOST times the median for the same arithmetic."""
    usual = statistics.median(seconds)
    worst: dict[str, float] = {}
    for host, taken in zip(rank_hosts, seconds, strict=True):
        worst[host] = max(worst.get(host, 0.0), taken)
    slow = {host: taken / usual for host, taken in worst.items() if taken > SLOW_HOST * usual}
    if not slow:
        return "every rank computes as fast as the others: look at the network, the data, or all hosts alike"
    named = ", ".join(f"{host} ({ratio:.1f} times the median)" for host, ratio in slow.items())
    return f"slow to compute: {named}; look for other jobs, heat and power limits there"


def heartbeats(run: RunDir, ranks: int) -> dict[int, Any]:
    """{rank: newest heartbeat} of all ranks that have one."""
    found = {rank: read_json(run.heartbeat(rank)) for rank in range(ranks)}
    return {rank: beat for rank, beat in found.items() if beat}


def diagnose(run: RunDir, rank_hosts: list[str], before: dict[int, Any], limit_s: float) -> Failure:
    """What stands still and why, from heartbeats of before and after the dump and from the stacks."""
    after = heartbeats(run, len(rank_hosts))
    stacks = {rank: _stack(run.rank_stacks(host, rank)) for rank, host in enumerate(rank_hosts)}
    waits = {rank: waiting_in(stack) for rank, stack in stacks.items()}
    silent = [rank for rank in range(len(rank_hosts)) if rank not in after or after[rank] == before.get(rank)]
    # A rank that computes between two looks is no culprit only because it is alone: the others must be waiting for it.
    odd = silent or [r for r, wait in waits.items() if wait is None and any(waits.values())] or _minority(after)
    others = [rank for rank in after if rank not in odd]
    common = collections.Counter(_where(after[r], waits[r]) for r in others or after).most_common(1)
    rest = f"; {'the others wait' if odd else 'all ranks wait'} in {common[0][0]}" if common else ""
    if silent:
        what = f"{_names(silent, rank_hosts)} does not answer: it is stopped, or its host is gone"
    elif odd:
        what = f"{_names(odd, rank_hosts)} is {_doing(after[odd[0]], waits[odd[0]], stacks[odd[0]])}"
    else:
        what = "no rank is ahead or behind: the network between them, or a device, has stopped"
    rank = odd[0] if odd else 0
    message = f"no progress for {limit_s:.0f} s: {what}{rest}. Stacks of all ranks: {run.logs}/*.stacks"
    log = run.rank_stacks(rank_hosts[rank], rank)
    return Failure(
        rank, rank_hosts[rank], message, log if log.exists() else run.rank_log(rank_hosts[rank], rank), "stall"
    )


def waiting_in(stack: str) -> str | None:
    """Name of the collective that a stack (innermost call first) waits in; None for a rank that is elsewhere."""
    for frame in _FRAME.finditer(stack):
        file, function = frame["file"], frame["function"]
        if file.endswith(("distributed_c10d.py", "/deepspeed/comm/comm.py")) and function not in (
            "wrapper",
            "log_wrapper",
        ):
            return function
        if function == "wait" and "/deepspeed/" in file:
            return "wait"
        if not any(part in file for part in _LIBRARIES):
            return None
    return None


def _minority(beats: dict[int, Any]) -> list[int]:
    """Ranks that are not where most ranks are."""
    places = collections.Counter((beat["step"], beat["phase"]) for beat in beats.values())
    if len(places) < 2:
        return []
    usual = places.most_common(1)[0][0]
    return [rank for rank, beat in beats.items() if (beat["step"], beat["phase"]) != usual]


def _where(beat: Any, wait: str | None) -> str:
    place = f"{beat['phase']} of step {beat['step']}"
    return f"{wait} ({place})" if wait else place


def _doing(beat: Any, wait: str | None, stack: str) -> str:
    if wait:
        return f"in {_where(beat, wait)}"
    for frame in _FRAME.finditer(stack):
        if not any(part in frame["file"] for part in _LIBRARIES):
            return f"at {frame['file']}:{frame['line']} in {frame['function']} ({_where(beat, None)})"
    return f"in {_where(beat, None)}"


def _names(ranks: list[int], hosts: list[str]) -> str:
    shown = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks[:4])
    return shown + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def _stack(path: Path) -> str:
    """The main thread's part of a dump: the one that ends in the worker's own file."""
    try:
        parts = path.read_text(errors="replace").split("\n\n")
    except OSError:
        return ""
    return next((part for part in parts if "worker.py" in part and part.rstrip().endswith("<module>")), "")
