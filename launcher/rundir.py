"""The run folder: the only builder of its paths, its exclusive creation, and atomic writes into it.

Used by the launcher to create and read runs and by workers to find their files.
Must never overwrite a run: `create` refuses a folder that holds one.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.errors import Problem, UserError

STEP_PREFIX = "step_"


class RunDir:
    """Paths of one run; nothing is created by constructing it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.plan = self.path / "plan.json"
        self.config = self.path / "config.yaml"
        self.overrides = self.path / "overrides.txt"
        self.ds_config = self.path / "ds_config.json"
        self.effective = self.path / "effective.json"
        self.provenance = self.path / "provenance.json"
        self.metrics = self.path / "metrics.jsonl"
        self.generations = self.path / "generations.jsonl"
        self.summary = self.path / "summary.json"
        self.audit = self.path / "audit.json"
        self.hardware = self.path / "hardware.json"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.latest = self.checkpoints / "latest"
        self.export = self.path / "export"
        self.history = self.path / "history"
        self.control = self.path / "control"
        self.stop_request = self.control / "stop"
        self.abort_request = self.control / "abort"
        self.dump_request = self.control / "dump"
        self.measure_request = self.control / "measure"
        self.measured = self.control / "measured.json"
        self.launcher_beat = self.control / "launcher.json"
        self.status = self.control / "status.json"
        self.result = self.control / "result.json"
        self.rendezvous = self.control / "rendezvous.json"
        self.hostfile = self.control / "hostfile"
        self.launcher_log = self.logs / "launcher.log"

    def rank_log(self, host: str, rank: int) -> Path:
        """Log file of one global rank."""
        return self.logs / f"{host}.rank{rank}.log"

    def rank_stacks(self, host: str, rank: int) -> Path:
        """Stacks of a rank's threads, written when it makes no progress."""
        return self.logs / f"{host}.rank{rank}.stacks"

    def heartbeat(self, rank: int) -> Path:
        """Where a rank says, every two seconds, what it is doing."""
        return self.control / f"heartbeat.rank{rank}.json"

    @property
    def secret_mark(self) -> str:
        """How the names of this run's secret files begin."""
        return f"zerolaunch-{hashlib.sha256(str(self.plan).encode()).hexdigest()[:24]}."

    def secrets(self, rank: int) -> Path:
        """File in the memory of a rank's host through which it gets secrets; never in the run's folder."""
        return Path("/dev/shm") / f"{self.secret_mark}{rank}"

    def failure(self, rank: int) -> Path:
        """Record that a failing rank writes before it dies."""
        return self.control / f"failure.rank{rank}.json"

    def done(self, rank: int) -> Path:
        """Mark of a rank that came to its end."""
        return self.control / f"done.rank{rank}"

    def left(self, rank: int) -> Path:
        """Mark of a rank that ended because it was told to."""
        return self.control / f"left.rank{rank}"

    def done_ranks(self) -> list[Path]:
        """The marks of all ranks that came to their end."""
        return list(self.control.glob("done.rank*"))

    def failures(self) -> list[Path]:
        """Every failure record there is."""
        return sorted(self.control.glob("failure.rank*.json"))

    def attempt(self, number: int) -> Path:
        """Folder that keeps the files of an earlier attempt."""
        return self.history / f"{number:04d}"

    def pid(self, rank: int) -> Path:
        """Process id and host of a rank, written when it starts."""
        return self.control / f"pid.rank{rank}.json"

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after optimizer step `step`."""
        return self.checkpoints / f"{STEP_PREFIX}{step:08d}"

    def checkpoint_names(self) -> list[str]:
        """Names of the checkpoint folders there are, whole or not."""
        return sorted(path.name for path in self.checkpoints.glob(f"{STEP_PREFIX}*"))

    @property
    def exists(self) -> bool:
        """Whether this folder holds a run."""
        return self.plan.is_file()

    def sources(self) -> dict[str, str]:
        """Where each option of this run came from; empty for a run that did not record it."""
        return dict((read_json(self.provenance) or {}).get("sources", {}))

    def create(self) -> None:
        """Makes the folder and claims it; raises UserError when it holds a run or cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            taken = sorted(entry.name for entry in self.path.iterdir())
            if taken:
                raise UserError(
                    Problem(
                        "run.dir",
                        str(self.path),
                        "it already holds a run" if self.exists else f"it is not empty ({', '.join(taken[:3])})",
                        f"continue it with recipe=resume run.dir={self.path}, or choose another run.dir"
                        if self.exists
                        else "choose an empty or new folder",
                    )
                )
            self.control.mkdir()  # exclusive: of two launchers that race for one folder, the second fails here
            self.logs.mkdir()
            self.checkpoints.mkdir()
        except FileExistsError as error:
            if Path(error.filename or "") != self.control:
                raise _unwritable(self.path, error) from None
            raise UserError(
                Problem("run.dir", str(self.path), "another launch has just taken it", "choose another run.dir")
            ) from None
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def reset_control(self) -> None:
        """Clears the signals of an earlier attempt (stop request, failures, result)."""
        self.control.mkdir(exist_ok=True)
        for entry in self.control.iterdir():
            entry.unlink()


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        Problem("run.dir", str(path), f"it cannot be created: {error.strerror}", "choose a folder you may write to")
    )


def shared_memory_of(port: int | str | None) -> str:
    """Glob of the 69 MB a rank that DeepSpeed's CPU operator leaves in a host's memory for the job on this port.

    csrc/cpu/comm/shm.cpp names them by user, address, port and rank, and nothing there ever unlinks them.
    """
    return f"/dev/shm/deepspeed_allreduce_buffer_*_{port}_*"


def drop_shared_memory(port: int | str | None) -> None:
    """Removes them from this host."""
    for path in glob.glob(shared_memory_of(port)):
        with contextlib.suppress(OSError):
            os.unlink(path)


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` that is there."""
    parent = path
    while not parent.exists():
        parent = parent.parent
    return parent


def check_writable(path: Path) -> None:
    """Raises UserError when `path` could not be created; creates nothing."""
    parent = existing_parent(path)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        reason = "is not a folder" if not parent.is_dir() else "may not be written to"
        raise UserError(Problem("run.dir", str(path), f"{parent} {reason}", "choose a folder you may write to"))


def write_json(path: Path, value: Any) -> None:
    """Replaces `path` by pretty JSON of `value`, atomically: a reader sees the old or the new file."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """`value` as pretty JSON, as every file of a run folder holds it."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by `text`, atomically and synced."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def try_write(write: Callable[..., None], path: Path, content: Any) -> bool:
    """Whether `write(path, content)` could be done: a disk that is full must not keep a run from being ended."""
    try:
        write(path, content)
    except OSError:
        return False
    return True


def overwrite(path: Path, text: str) -> None:
    """Writes a short `text` over the content of `path`, in place: cheap, and other hosts see it when they open it."""
    with open(path, "r+" if path.exists() else "w", encoding="utf-8") as file:
        file.write(text)
        file.truncate()


def read_json(path: Path) -> Any:
    """The JSON value in `path`, or None when there is no such (complete, undamaged) file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # no JSON, or no UTF-8
        return None


def load_run(path: str | None) -> RunDir:
    """The existing run that `run.dir` names; raises UserError when there is none."""
    if not path:
        raise UserError(Problem("run.dir", "nothing", "this recipe works on an existing run", "add run.dir=runs/NAME"))
    run = RunDir(path)
    if not run.exists:
        raise UserError(Problem("run.dir", path, "it holds no run (no plan.json)", "name the folder of a run"))
    return run


def start_time(pid: int) -> str | None:
    """When process `pid` of this machine was started, in clock ticks since boot; None when no such process lives.

    A run folder notes processes by both: the number alone may be another's by now.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
