"""Executes plans: checks, data preparation, the run folder, the `deepspeed` front-end, the summary.

Called by `launcher.cli` once a plan stands. The only starter of processes besides `supervise`.
Must never leave anything behind for a request that is refused: the run folder is made last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import attempts, compose, env, render
from launcher.check import before_launch, preflight, refuse_failed, refuse_precision, refuse_small_disk
from launcher.cluster.checks import FAIL
from launcher.cluster.filters import spec
from launcher.cluster.preflight import Finding, collective_findings, failed
from launcher.command import (
    ROOT,
    batch_script,
    deepspeed_command,
    hostfile_text,
    local_worker_command,
    operators_command,
)
from launcher.errors import EXIT_OK, EXIT_PREFLIGHT, EXIT_TRAINING, Problem, UserError, raise_if
from launcher.leftovers import end_on_hosts
from launcher.plan import ModelFacts, Plan, build_plan, installed_versions
from launcher.profiled import keep
from launcher.rendezvous import rendezvous, secrets_on_hosts
from launcher.resume import changed_layout, rebatched
from launcher.rundir import (
    RunDir,
    check_writable,
    drop_shared_memory,
    existing_parent,
    read_json,
    write_json,
)
from launcher.schema import RecipeSection, RunConfig
from launcher.supervise import Ending, Job, supervise

RESTARTED = ("killed", "peer", "stall", "launcher")  # kinds of failure that another attempt may not meet
COLLECTIVE_LIMIT_S = 180.0  # starting Python with torch on every host takes most of it
Ask = Callable[[dict[str, Any]], dict[str, Any]]  # a job: the request in, its answer out


@dataclass
class Outcome:
    """What one request came to. `run_dir` is None when nothing was started."""

    exit_code: int
    run_dir: Path | None
    overrides: list[str]
    summary: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def check(plan: Plan, overrides: list[str]) -> Outcome:
    """`mode=check`: every host is looked at, then all ranks meet in a short collective. Starts and keeps nothing."""
    run = _run_folder(plan.config)
    address, port = rendezvous(plan)
    findings = preflight(plan, run, address, port)
    measured = None
    if not failed(findings) and plan.config.check.collective:
        _build_operators(plan)
        measured, more = _measure_collective(plan, run)
        findings += more
    render.check(plan, findings, measured)
    return Outcome(EXIT_PREFLIGHT if failed(findings) else EXIT_OK, None, overrides)


def submit(plan: Plan, overrides: list[str]) -> Outcome:
    """`launch.submit=sbatch`: writes the batch script beside the run folder-to-be and hands it to Slurm."""
    run = _run_folder(plan.config)
    if run.path.exists():
        _refuse_existing(run)
    check_writable(run.path)
    script = run.path.with_name(run.path.name + ".sbatch")
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        with script.open("x", encoding="utf-8") as file:
            file.write(batch_script(plan, run, overrides, os.getcwd()))
    except FileExistsError:
        why = "a job of this name has been submitted before"
        raise UserError(Problem("run.dir", str(script), why, "choose another run.dir, or remove the script")) from None
    try:
        answer = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
        code, said = answer.returncode, (answer.stdout or answer.stderr).strip()
    except OSError as error:
        code, said = 127, f"sbatch: {error.strerror}"
    if code:
        script.unlink()
        why = "Slurm did not take the job"
        raise UserError(Problem("launch.submit", said, why, "correct launch.nodes, launch.slots or launch.sbatch"))
    render.submitted(said.partition(";")[0], script, run)
    return Outcome(EXIT_OK, run.path, overrides, {"job": said.partition(";")[0]})


def train(plan: Plan, overrides: list[str], sources: dict[str, str]) -> Outcome:
    """Prepares, starts and watches one training run; writes and shows its summary. `sources`: `provenance.sources`."""
    run = _run_folder(plan.config)
    if plan.resume_from is None:
        if run.path.exists():
            _refuse_existing(run)
        check_writable(run.path)
    if not plan.cluster.local and plan.config.cluster.preflight:
        before_launch(plan, run, *rendezvous(plan))
    elif plan.cluster.local:
        refuse_precision(plan)
        refuse_small_disk(plan, run)
    _prepare_data(plan)
    _build_operators(plan)
    attempt = attempts.begin(run, plan, overrides, _provenance(sources))
    ending = _start(run, plan, attempt)
    summary = attempts.end(run, plan, ending, attempt)
    for left in range(plan.config.cluster.restarts, 0, -1):
        again = _restarted(run, plan, ending, left)
        if again is None:
            break
        plan = again
        attempt = attempts.begin(run, plan, overrides, _provenance(sources))
        ending = _start(run, plan, attempt)
        summary = attempts.end(run, plan, ending, attempt)
    render.finish(run, plan, summary, ending.failure)
    if plan.config.recipe.name == "profile" and ending.exit_code == EXIT_OK:
        render.text("\n".join(keep(run, plan, summary)))
    return Outcome(ending.exit_code, run.path, overrides, summary, ending.failure.message if ending.failure else None)


def whole_checkpoint(run: RunDir, step: int | None = None, best: bool = False) -> dict[str, Any]:
    """{"checkpoint": folder, "manifest": its manifest} of the newest good one, that of `step` or the `best`.

    Raises UserError when there is none.
    """
    return ask_worker("find_checkpoint", {"run_dir": str(run.path), "step": step, "best": best})


def worker_environment(config: RunConfig) -> dict[str, str]:
    """Variables every worker gets through the plan: allow-listed ones, ours, then `cluster.env`."""
    variables = env.forwarded()
    if config.cluster.kind != "local":
        variables |= {name: text for name, text in env.deepspeed_env_files().items() if not env.SECRET.search(name)}
    variables["TORCH_EXTENSIONS_DIR"] = str(env.extensions_dir())
    variables.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.tracker.kind == "wandb" and not env.has_wandb_key():
        variables.setdefault("WANDB_MODE", "offline")
    return variables | {name: str(value) for name, value in config.cluster.env.items()}


def ask_worker(job: str, request: dict[str, Any]) -> dict[str, Any]:
    """Runs one short job of `recipes` in a process of its own: JSON in, JSON out; its UserErrors become ours."""
    with worker(job) as asked:
        return asked(request)


@contextlib.contextmanager
def worker(job: str) -> Iterator[Ask]:
    """The same, to be asked any number of times: the process loads what it needs meanwhile, and does nothing."""
    process = subprocess.Popen(
        local_worker_command("--job", job),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env.child_environment({"DS_ACCELERATOR": "cpu"}),  # short jobs take no GPU
    )
    requests, answers = process.stdin, process.stdout
    assert requests is not None and answers is not None

    def asked(request: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # a process that died has no answer, and that is what is said
            requests.write(json.dumps(request) + "\n")
            requests.flush()
        line = answers.readline()
        return _answer(job, line, 0 if line else process.wait())

    with process:  # at the end of its input it leaves
        try:
            yield asked
        except BaseException:
            process.kill()
            with contextlib.suppress(OSError):  # what it did not take any more
                requests.close()
            raise


@contextlib.contextmanager
def when_asked(job: str) -> Iterator[Ask]:
    """The same, for a job that may not be needed: its process is started by the first request."""
    with contextlib.ExitStack() as stack:
        started: list[Ask] = []

        def asked(request: dict[str, Any]) -> dict[str, Any]:
            if not started:
                started.append(stack.enter_context(worker(job)))
            return started[0](request)

        yield asked


def _answer(job: str, said: str, code: int) -> dict[str, Any]:
    try:
        answer = json.loads(said)
    except json.JSONDecodeError:
        raise UserError(
            Problem(job, f"exit code {code}", "the process died; its output is above", "see its output"),
            code=EXIT_TRAINING,
        ) from None
    if "problems" in answer:
        raise UserError(*(Problem(**problem) for problem in answer["problems"]), code=answer["code"])
    return dict(answer)


def _run_folder(config: RunConfig) -> RunDir:
    if config.run.dir is not None:
        return RunDir(config.run.dir)
    base = Path(config.run.root) / (config.run.name or compose.auto_name(config))
    path, number = base, 1
    while config.run.name is None and path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return RunDir(path)


def _refuse_existing(run: RunDir) -> None:
    if run.path.is_dir() and not any(run.path.iterdir()):
        return
    holds = "it already holds a run" if run.exists else "it exists and is not an empty folder"
    fix = f"continue it with recipe=resume run.dir={run.path}, or choose another run.dir"
    raise UserError(Problem("run.dir", str(run.path), holds, fix if run.exists else "choose another run.dir"))


def _prepare_data(plan: Plan) -> None:
    """Tokenises the corpus into the cache and checks it against the model, before anything is created."""
    render.note("preparing data")
    request = {"data": plan.config.data, "sequence_length": plan.config.train.sequence_length}
    answer = ask_worker("prepare", request | {"source": plan.config.run.source})
    render.notes(answer["notes"])
    model_vocabulary = plan.config.model.config.get("vocab_size")
    if isinstance(model_vocabulary, int) and (answer["vocab_size"] or 0) > model_vocabulary:
        whose = f"the tokenizer in {answer['tokenizer']}" if answer["tokenizer"] else "the corpus"
        raise UserError(
            Problem(
                "model.config.vocab_size",
                str(model_vocabulary),
                f"{whose} has ids up to {answer['vocab_size'] - 1}",
                f"use model.config.vocab_size={answer['vocab_size']} or more, or another tokenizer",
            )
        )


def _build_operators(plan: Plan) -> None:
    """Compiles the DeepSpeed operators this machine lacks; a no-op once they are there."""
    process = subprocess.run(operators_command(plan), env=env.child_environment(plan.env), check=False)
    if process.returncode:
        raise UserError(
            Problem(
                "DeepSpeed operators",
                f"exit code {process.returncode}",
                "an operator this plan needs does not compile here; the lines above name it and its log",
                "install g++ and the Python headers (Debian: build-essential python3-dev)",
            )
        )


def _start(run: RunDir, plan: Plan, attempt: int) -> Ending:
    render.start(run, plan, attempt)
    with render.progress(plan) as progress:
        return _execute(run, plan, progress.metrics, progress.status)


def _restarted(run: RunDir, plan: Plan, ending: Ending, left: int) -> Plan | None:
    """The plan that goes on after a loss, from the newest good checkpoint; None where going on would not help.

    Lost are ranks that were killed, that stand still, or whose host is gone. What a rank raised by itself (a wrong
    configuration, memory that is too small) it would raise again.
    """
    failure = ending.failure
    if failure is None or ending.exit_code != EXIT_TRAINING or failure.kind not in RESTARTED:
        return None
    render.note(f"{failure.message}; starting again ({left} of cluster.restarts left)")
    try:
        newest = whole_checkpoint(run)
        if not plan.cluster.local and plan.config.cluster.preflight:
            findings = preflight(plan, run, *rendezvous(plan))
            lost = {found.host for found in findings if found.status == FAIL and found.check == "reachable"}
            if lost and len(lost) < len(plan.cluster.hosts):
                render.note(f"going on without {', '.join(sorted(lost))}")
                plan = _without(plan, lost, newest["manifest"])
                before_launch(plan, run, *rendezvous(plan))
            else:
                refuse_failed(findings)
    except UserError as error:
        render.problems(error.problems)
        return None
    return dataclasses.replace(plan, resume_from=newest["checkpoint"])


def _without(plan: Plan, lost: set[str], manifest: dict[str, Any]) -> Plan:
    """The same run on the hosts that are left, with the same global batch; raises UserError when it cannot go on so."""
    left = {host.name: host.slots for host in plan.cluster.hosts if host.name not in lost}
    cluster = dataclasses.replace(plan.config.cluster, include=spec(left), exclude=None)
    config = dataclasses.replace(plan.config, cluster=cluster)
    config = rebatched(config, plan.batch, sum(map(len, left.values())), plan.world_size, set())
    known = ModelFacts(plan.estimate.parameters)
    smaller = build_plan(config, worker_environment(config), lambda *asked: known)
    raise_if(changed_layout(smaller, manifest))
    return smaller


def _execute(
    run: RunDir,
    plan: Plan,
    on_metrics: Callable[[dict[str, Any]], None],
    on_status: Callable[[str], None],
    limit_s: float | None = None,
) -> Ending:
    """Runs the plan's recipe on all its ranks, through the `deepspeed` front-end, to its end."""
    address, port = rendezvous(plan)
    local, launcher = plan.cluster.local, plan.config.cluster.launcher
    write_json(run.rendezvous, {"MASTER_ADDR": address or "127.0.0.1", "MASTER_PORT": port})
    job = Job(
        deepspeed_command(plan, run, port, address),
        env.front_end_environment(plan.env, remote_shell=not local and launcher in ("pdsh", "slurm")),
        None if local else "/",  # DeepSpeed changes to this folder on every host, and its name would not be quoted
        run,
        plan.cluster.rank_hosts(),
        local,
        plan.config.watch,
        lambda: {} if local else end_on_hosts(run, plan, port),
        limit_s,
    )
    try:
        with secrets_on_hosts(run, plan):
            return supervise(job, on_metrics, on_status)
    finally:
        drop_shared_memory(port)


def _measure_collective(plan: Plan, run: RunDir) -> tuple[dict[str, Any] | None, list[Finding]]:
    """All ranks in a collective, and every two hosts with each other, in a folder that is removed again."""
    folder = RunDir(existing_parent(run.path) / f".zerolaunch-check-{uuid.uuid4().hex[:12]}")
    config = dataclasses.replace(plan.config, recipe=RecipeSection("check", None))
    plan = dataclasses.replace(plan, config=config)
    folder.create()
    try:
        if not plan.cluster.local:
            folder.hostfile.write_text(hostfile_text(plan))
        write_json(folder.plan, plan.to_json())
        ending = _execute(folder, plan, lambda record: None, render.note, COLLECTIVE_LIMIT_S)
        result = read_json(folder.result)
        if ending.failure is None and result is not None:
            return result, collective_findings(plan, result)
        failure = ending.failure
        lines = failure.log.read_text(errors="replace").splitlines()[-render.LAST_LINES :] if failure else []
        got = failure.message if failure else "it was interrupted"
        why = "the ranks could not talk to each other: " + " | ".join(lines[-3:])
        host = (failure.host if failure else None) or "all hosts"
        fix = "see the network between the hosts: interface, firewall, cluster.env.NCCL_DEBUG=INFO"
        return None, [Finding(host, "collective", FAIL, got, why, fix)]
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)


def _provenance(sources: dict[str, str]) -> dict[str, Any]:
    def git(*arguments: str) -> str | None:
        answer = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return answer.stdout.strip() if answer.returncode == 0 else None

    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": installed_versions(),
        "revision": git("rev-parse", "HEAD"),
        "changed_files": (git("status", "--porcelain") or "").splitlines(),
        "sources": sources,
    }
