"""Entry of every process of ours: a rank of a run (PLAN.json), or one short job (--job NAME, JSON in and out).

Started by the `deepspeed` launcher once per rank, by `launcher.run` for jobs. Redirects output before heavy imports.
Must never see Hydra, YAML or overrides: the plan file says everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launcher.errors import UserError, format_problems  # noqa: E402 - the checkout goes first on the path
from launcher.plan import Plan, read_plan  # noqa: E402
from launcher.rundir import RunDir, write_json  # noqa: E402

ABORT_POLL_S = 1.0
JOBS = {
    "prepare": "recipes.shared.data.prepare",
    "profile": "recipes.shared.profile",
    "find_checkpoint": "recipes.shared.checkpoint.find",
    "export": "recipes.export",
}
# What a rank sees when another one is gone: it is a consequence, not the cause.
PEER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "ncclRemoteError",
    "NCCL communicator was aborted",
)


def main() -> int:
    """A job or a rank, by the arguments."""
    # Loading a compiled operator runs ninja, which lies beside the interpreter: not on the PATH of an SSH session.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if sys.argv[1] == "--job":
        return run_job(sys.argv[2])
    path = Path(sys.argv[1])
    plan, run = read_plan(path), RunDir(path.parent)
    os.environ.update(plan.env)
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    host = plan.cluster.rank_hosts()[rank]
    _redirect_output(run.rank_log(host, rank))
    write_json(run.pid(rank), {"pid": os.getpid(), "host": host})
    _watch_for_abort(run)
    _run_rank(plan, run, rank, host)


def run_job(name: str) -> int:
    """One job: request as JSON on stdin, answer (or problems) as one JSON line on stdout."""
    answer_to = os.dup(1)
    os.dup2(2, 1)  # libraries print on stdout; the answer must be alone there
    request = json.load(sys.stdin)
    try:
        answer = importlib.import_module(JOBS[name]).run_job(request)
    except UserError as error:
        answer = {"problems": [dataclasses.asdict(problem) for problem in error.problems], "code": error.code}
    with os.fdopen(answer_to, "w") as file:
        file.write(json.dumps(answer) + "\n")
    return 0


def _run_rank(plan: Plan, run: RunDir, rank: int, host: str) -> NoReturn:
    """Runs the recipe; a failure is recorded with its kind before the process leaves."""
    try:
        importlib.import_module(f"recipes.{plan.config.recipe.name}").run(plan, run)
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, UserError):
            print(format_problems(error.problems, f"rank {rank}: {len(error.problems)} problem(s)"), file=sys.stderr)
        sys.stderr.flush()
        write_json(run.failure(rank), _failure(error, rank, host))
        _drop_shared_memory()
        os._exit(1)  # without waiting for collectives that will never complete
    run.done(rank).touch()
    _drop_shared_memory()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking the interpreter with torch in it down in order takes seconds and tells nobody anything


def _drop_shared_memory() -> None:
    """Unlinks the buffers that DeepSpeed's CPU communication left in this host's memory for this job's port."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ.get('MASTER_PORT')}_*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _failure(error: BaseException, rank: int, host: str) -> dict[str, Any]:
    text = str(error).strip() or "no message"
    kind = "peer" if any(sign in text for sign in PEER_SIGNS) else "error"
    if isinstance(error, MemoryError) or "out of memory" in text.lower():
        kind = "memory"
    message = f"{type(error).__name__}: {text.splitlines()[0]}"
    return {"rank": rank, "host": host, "kind": kind, "message": message, "time": time.time()}


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


def _watch_for_abort(run: RunDir) -> None:
    """A thread that ends this process when the launcher asks for it: works on every host that sees the run folder."""
    started = time.time()

    def watch() -> None:
        while True:
            time.sleep(ABORT_POLL_S)
            with contextlib.suppress(OSError):
                if run.abort_request.stat().st_mtime >= started - 1:
                    print("the launcher aborted the job", file=sys.stderr, flush=True)
                    os._exit(1)

    threading.Thread(target=watch, daemon=True, name="abort").start()


if __name__ == "__main__":
    raise SystemExit(main())
