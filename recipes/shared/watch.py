"""What a rank shows of itself while it runs, from a thread of its own: position, stacks on request, obedience.

Started by `recipes.worker` before anything heavy is imported; recipes move the position. Standard library only.
Must never need the main thread: that one may hang, and the question is where.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time

from launcher.rundir import RunDir, overwrite, start_time

POLL_S = 1.0
BEAT_S = 2.0
LAUNCHER_GONE_S = 9.0  # without a sign of the launcher, read from a file that it overwrites every second
LAUNCHER_SIGNS = 6  # readings that must agree: a file system that hangs is no launcher that is gone


class Watch:
    """One rank's thread. `at` is cheap enough for every micro-batch."""

    def __init__(self, run: RunDir, rank: int, host: str, local: bool) -> None:
        self.run, self.rank, self.local = run, rank, local
        self.step, self.phase, self.moves = 0, "starting", 0
        self.stacks = run.rank_stacks(host, rank)
        self.launcher = Launcher(run, local)
        self.dumped = False

    def start(self) -> None:
        """Begins to watch; the thread ends with the process."""
        threading.Thread(target=self._work, daemon=True, name="watch").start()

    def at(self, phase: str, step: int | None = None) -> None:
        """This rank is now in `phase` (of `step`). A move is what the launcher takes for progress."""
        self.phase = phase
        self.step = self.step if step is None else step
        self.moves += 1

    def arm(self, seconds: float) -> None:
        """Has the interpreter dump every stack unless it is armed again in time, even while a C call holds the lock."""
        if not self.dumped:
            self._open_stacks()
            faulthandler.dump_traceback_later(seconds, file=self._file)

    def close(self) -> None:
        """Ends the timer of `arm`; no empty file of stacks is left."""
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            if self.stacks.stat().st_size == 0:
                self.stacks.unlink()

    def _work(self) -> None:
        beaten = 0.0
        while True:
            with contextlib.suppress(OSError, json.JSONDecodeError):
                if self.run.abort_request.exists():
                    self._leave("the launcher aborted the job")
                if self.launcher.gone():
                    self._leave("the launcher is gone")
                if time.monotonic() - beaten >= BEAT_S:
                    beaten = time.monotonic()
                    self._beat()
                if not self.dumped and self.run.dump_request.exists():
                    self._dump()
            time.sleep(POLL_S)

    def _leave(self, why: str) -> None:
        """Ends this process at once, whatever its main thread does."""
        print(why, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            self.run.left(self.rank).touch()
        os._exit(1)

    def _beat(self) -> None:
        position = {"step": self.step, "phase": self.phase, "moves": self.moves, "time": time.time()}
        overwrite(self.run.heartbeat(self.rank), json.dumps(position))

    def _dump(self) -> None:
        self.dumped = True
        faulthandler.cancel_dump_traceback_later()
        self._open_stacks()
        faulthandler.dump_traceback(file=self._file, all_threads=True)
        self._beat()

    def _open_stacks(self) -> None:
        if not hasattr(self, "_file"):
            self._file = open(self.stacks, "w")  # noqa: SIM115 - the interpreter writes to it whenever it must


class Launcher:
    """Whether the launcher still lives: its process on this machine, the file that it overwrites elsewhere."""

    def __init__(self, run: RunDir, local: bool) -> None:
        self.file, self.local = run.launcher_beat, local
        self.seen, self.since, self.signs = "", time.monotonic(), 0

    def gone(self) -> bool:
        """False while in doubt. Raises OSError when the file cannot be read."""
        text = self.file.read_text()
        if self.local:
            process = json.loads(text)  # another beat may be on its way into the file: then it is no JSON
            return start_time(process["pid"]) != process["started"]
        if text != self.seen:
            self.seen, self.since, self.signs = text, time.monotonic(), 0
        self.signs += 1
        return self.signs > LAUNCHER_SIGNS and time.monotonic() - self.since > LAUNCHER_GONE_S


WATCH: Watch | None = None


def begin(run: RunDir, rank: int, host: str, local: bool) -> None:
    """Starts this process's watch."""
    global WATCH
    WATCH = Watch(run, rank, host, local)
    WATCH.start()


def at(phase: str, step: int | None = None) -> None:
    """Moves this process's position; does nothing where there is no watch (tests, jobs)."""
    if WATCH is not None:
        WATCH.at(phase, step)


def arm(seconds: float) -> None:
    """See `Watch.arm`."""
    if WATCH is not None:
        WATCH.arm(seconds)


def close() -> None:
    """See `Watch.close`."""
    if WATCH is not None:
        WATCH.close()
