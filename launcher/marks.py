"""What the ranks of a job have left in its folder: errors, ends, processes.

Used by `launcher.supervise`.
Must never ask another host: what ranks elsewhere left is in the shared folder too.
"""

from __future__ import annotations

from launcher.errors import Failure
from launcher.rundir import RunDir, read_json, start_time


def first_failure(run: RunDir, rank_hosts: list[str], local: bool) -> Failure | None:
    """The earliest failure record, else (on this machine) a rank whose process is gone without a result."""
    recorded = recorded_failure(run)
    if (recorded is not None and recorded.kind != "peer") or not local or run.result.exists():
        return recorded
    for rank, host in enumerate(rank_hosts):
        entry = read_json(run.pid(rank))
        ended = run.failure(rank).exists() or run.done(rank).exists()
        if entry and not ended and start_time(int(entry["pid"])) is None:
            message = f"rank {rank} on {host} was killed (no error of its own)"
            return Failure(rank, host, message, run.rank_log(host, rank), "killed")
    return recorded


def recorded_failure(run: RunDir) -> Failure | None:
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


def any_process_lives(run: RunDir, world_size: int) -> bool:
    """Whether a rank of this machine that has not come to its end is still a process."""
    pids = [read_json(run.pid(rank)) for rank in range(world_size) if not run.done(rank).exists()]
    return any(entry and start_time(int(entry["pid"])) is not None for entry in pids)


def lost_rank(run: RunDir, rank_hosts: list[str]) -> Failure | None:
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


def finished(run: RunDir, world_size: int) -> bool:
    """Whether rank 0 has written the result and every rank has come to its end."""
    return run.result.exists() and len(run.done_ranks()) == world_size
