"""Preflight of every host of a plan: `mode=check`, and before each launch on several hosts.

Called by `launcher.cli` and `launcher.run`. Sends the probe, has the answers judged, shows one table.
Must never leave anything behind: the file that shows whether folders are shared is removed again.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from launcher import render
from launcher.cluster.checks import FAIL, WARN, needs_cpu_fp16, precision, room_needed
from launcher.cluster.preflight import Finding, judge, request
from launcher.errors import EXIT_PREFLIGHT, Problem, UserError
from launcher.onhost import probe
from launcher.plan import Plan
from launcher.remote import Reach, run_script
from launcher.rundir import RunDir, existing_parent

PROBE = Path(probe.__file__)


def preflight(plan: Plan, run: RunDir, address: str | None, port: int) -> list[Finding]:
    """Asks every host at once; returns what was found, in the hosts' order. Bounded by `check.timeout_s`."""
    hosts = plan.cluster.hosts
    with _token(existing_parent(run.path)) as (file, token):
        requests = [request(plan, host, run, file, address, port) for host in hosts]
        here = {name: look(requests[0]) for name, look in probe.LOOKS.items() if name in ("versions", "code", "gpus")}
        here["checkpoints"] = len(run.checkpoint_names())
        names = [host.name for host in hosts]
        reach = Reach(plan.config.cluster, plan.cluster.local)
        answers = run_script(reach, names, PROBE, requests, plan.config.check.timeout_s, answers=2)
    return judge(plan, here, answers, token)


def before_launch(plan: Plan, run: RunDir, address: str | None, port: int) -> None:
    """Preflight, and `refuse_failed` of what it found."""
    render.note(f"preflight of {len(plan.cluster.hosts)} hosts")
    refuse_failed(preflight(plan, run, address, port))


def refuse_small_disk(plan: Plan, run: RunDir) -> None:
    """The part of a preflight that a run on this machine alone needs: raises UserError when a disk is too small."""
    problems = []
    for path, needed in room_needed(plan, len(run.checkpoint_names())).items():
        folder = existing_parent(Path(path) if path else run.path)
        free = shutil.disk_usage(folder).free
        if free < needed:
            got = f"{free / 1e9:.3f} GB free of {needed / 1e9:.3f} GB that are needed"
            where = "the disk of offload's nvme_path" if path else "the disk of run.dir"
            problems.append(Problem(where, got, f"the run would end at a full {folder}", "make room, or keep less"))
    if problems:
        raise UserError(*problems, code=EXIT_PREFLIGHT)


def refuse_precision(plan: Plan) -> None:
    """The same for the CPU of this machine: raises UserError when it does not compute in the plan's precision."""
    host = plan.cluster.hosts[0]
    facts = {"cpu_fp16": probe.seen(probe.cpu_fp16, {"cpu_fp16": needs_cpu_fp16(plan)})}
    refuse_failed([Finding(host.name, "precision", *found) for found in precision(plan, host, {}, facts)])


def refuse_failed(findings: list[Finding]) -> None:
    """Notes the warnings; raises UserError (exit code 4) with every failed check."""
    render.notes([f"{f.host}: {f.check}: {f.got}: {f.why}" for f in findings if f.status == WARN])
    problems = [
        Problem(f"{f.host}: {f.check.replace('_', ' ')}", f.got, f.why, f.fix) for f in findings if f.status == FAIL
    ]
    if problems:
        raise UserError(*problems, code=EXIT_PREFLIGHT)


@contextlib.contextmanager
def _token(folder: Path) -> Iterator[tuple[Path, str]]:
    """A file of random content in `folder`, for as long as the block runs."""
    token = uuid.uuid4().hex
    path = folder / f".zerolaunch-check-{token[:12]}"
    try:
        path.write_text(token)
    except OSError as error:
        why = f"it may not be written to ({error.strerror})"
        raise UserError(Problem("run.root", str(folder), why, "choose a folder you may write to")) from None
    try:
        yield path, token
    finally:
        path.unlink(missing_ok=True)
