"""Entry of every process of ours: a rank of a run (PLAN.json), or one short job (--job NAME, JSON in and out).

Started by the `deepspeed` launcher once per rank, by `launcher.run` for jobs. Redirects output before heavy imports.
Must never see Hydra, YAML or overrides: the plan file says everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launcher.errors import UserError, format_problems  # noqa: E402 - the checkout goes first on the path
from launcher.plan import Plan, read_plan  # noqa: E402
from launcher.rundir import RunDir, drop_shared_memory, read_json, try_write, write_json  # noqa: E402
from recipes.shared import watch  # noqa: E402 - standard library only

JOBS = {
    "prepare": "recipes.shared.data.prepare",
    "profile": "recipes.shared.profile",
    "find_checkpoint": "recipes.shared.checkpoint.find",
    "export": "recipes.export",
    "check_export": "recipes.check_export",
}
# Global and local rank as Slurm, Open MPI and MPICH (Hydra) tell a process of them.
RUNNERS = (
    ("SLURM_PROCID", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "MPI_LOCALRANKID"),
)
# Options of glibc's mallopt by the variables that set them (malloc.h).
MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
# What a rank sees when another one is gone: it is a consequence, not the cause.
PEER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "ncclRemoteError",
    "NCCL communicator was aborted",
)


def main() -> NoReturn:
    """A job or a rank, by the arguments."""
    # Loading a compiled operator runs ninja, which lies beside the interpreter: not on the PATH of an SSH session.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if sys.argv[1] == "--job":
        run_job(sys.argv[2])
        _leave(0)
    path = Path(sys.argv[1])
    plan, run = read_plan(path), RunDir(path.parent)
    rank = _take_rank(plan, run)
    host = plan.cluster.rank_hosts()[rank]
    _take_environment(plan, run, rank)
    _redirect_output(run.rank_log(host, rank))
    write_json(run.pid(rank), {"pid": os.getpid(), "host": host})
    watch.begin(run, rank, host, plan.cluster.local)
    _run_rank(plan, run, rank, host)


def _leave(code: int) -> NoReturn:
    """At once: taking the interpreter with torch in it down in order takes seconds and tells nobody anything."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_job(name: str) -> None:
    """One job: requests on stdin and answers (or problems) on stdout, each a line of JSON, until the input ends."""
    answer_to = os.dup(1)
    os.dup2(2, 1)  # libraries print on stdout; the answers must be alone there
    job = importlib.import_module(JOBS[name])  # the launcher may still be composing the request
    with os.fdopen(answer_to, "w") as file:
        for request in sys.stdin:
            try:
                answer = job.run_job(json.loads(request))
            except UserError as error:
                answer = {"problems": [dataclasses.asdict(problem) for problem in error.problems], "code": error.code}
            file.write(json.dumps(answer) + "\n")
            file.flush()


def _run_rank(plan: Plan, run: RunDir, rank: int, host: str) -> NoReturn:
    """Runs the recipe; a failure is recorded with its kind before the process leaves."""
    try:
        importlib.import_module(f"recipes.{plan.config.recipe.name}").run(plan, run)
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, UserError):
            print(format_problems(error.problems, f"rank {rank}: {len(error.problems)} problem(s)"), file=sys.stderr)
        sys.stderr.flush()
        watch.close()
        try_write(write_json, run.failure(rank), _failure(error, rank, host))
        drop_shared_memory(os.environ.get("MASTER_PORT"))
        _leave(1)  # without waiting for collectives that will never complete
    watch.close()
    run.done(rank).touch()
    drop_shared_memory(os.environ.get("MASTER_PORT"))
    _leave(0)


def _failure(error: BaseException, rank: int, host: str) -> dict[str, Any]:
    text = str(error).strip() or "no message"
    kind = "peer" if any(sign in text for sign in PEER_SIGNS) else "error"
    if isinstance(error, MemoryError) or "out of memory" in text.lower():
        kind = "memory"
    message = f"{type(error).__name__}: {text.splitlines()[0]}"
    return {"rank": rank, "host": host, "kind": kind, "message": message, "time": time.time()}


def _take_rank(plan: Plan, run: RunDir) -> int:
    """This process's global rank; where the runner is not DeepSpeed's own, RANK and its like are set from the runner's.

    srun and mpirun start a rank without them, and DeepSpeed would ask MPI, which need not be there.
    """
    names = next((names for names in RUNNERS if names[0] in os.environ), None)
    if "RANK" not in os.environ and names is not None:
        os.environ.update(RANK=os.environ[names[0]], LOCAL_RANK=os.environ[names[1]], WORLD_SIZE=str(plan.world_size))
        meeting = read_json(run.rendezvous) or {}
        os.environ.update({name: str(meeting[name]) for name in ("MASTER_ADDR", "MASTER_PORT") if name in meeting})
    return int(os.environ.get("RANK", "0"))


def _take_environment(plan: Plan, run: RunDir, rank: int) -> None:
    """The plan's variables, folders of PYTHONPATH ahead of this host's own, and this rank's secrets."""
    own = os.environ.get("PYTHONPATH")
    os.environ.update(plan.env)
    set_thresholds(plan.env)
    path = plan.env.get("PYTHONPATH")
    if path is not None and not plan.cluster.local:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (path, own)))
        sys.path[1:1] = [folder for folder in path.split(os.pathsep) if folder and folder not in sys.path]
    file = run.secrets(rank)
    with contextlib.suppress(FileNotFoundError):
        if file.stat().st_uid == os.getuid():
            os.environ.update(json.loads(file.read_text()))
            file.unlink()


def set_thresholds(variables: dict[str, str]) -> None:
    """What of `variables` glibc reads when a process starts: on another host they were not there yet."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library has none
    for name, option in MALLOPT.items():
        value = variables.get(name, "")
        if mallopt is not None and value.isdecimal():
            mallopt(option, int(value))


def _redirect_output(path: Path) -> None:
    """stdout and stderr of this process, C code included, go to its own log, line by line."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(handle, target)
    os.close(handle)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # both are text files here
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


if __name__ == "__main__":
    main()
