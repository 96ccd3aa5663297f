"""What an attempt leaves in its run's folder beside what its ranks write: the request before it, the summary after it.

Called by `launcher.run`.
Must never take a file of an earlier attempt away before what replaces it is there.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from launcher import compose, render
from launcher.command import hostfile_text
from launcher.plan import Plan
from launcher.planner import surprise
from launcher.rundir import STEP_PREFIX, RunDir, read_json, try_write, write_json, write_text
from launcher.supervise import Ending


def begin(run: RunDir, plan: Plan, overrides: list[str], provenance: dict[str, Any]) -> int:
    """Creates or continues the run folder; returns the number of this attempt (1 for a new run).

    `provenance`: when, where, by what command and versions it starts, and where each option comes from.
    """
    attempt = 1
    if plan.resume_from is None:
        run.create()
    else:
        attempt = 2 + len(list(run.history.glob("*"))) if run.history.exists() else 2
        kept = run.attempt(attempt - 1)
        kept.mkdir(parents=True)
        for path in (run.plan, run.config, run.overrides, run.ds_config, run.provenance):
            if path.exists():  # they stay until they are replaced: killed in between, this is still a run
                shutil.copyfile(path, kept / path.name)
        for path in (run.effective, run.audit, run.summary):
            if path.exists():
                os.replace(path, kept / path.name)
        run.reset_control()
        step = int(Path(plan.resume_from).name.removeprefix(STEP_PREFIX))
        for path in (run.metrics, run.generations):
            _drop_later_records(path, step, kept)
    write_text(run.config, compose.composed_yaml(plan.config))
    write_text(run.overrides, "".join(f"{text}\n" for text in overrides))
    write_json(run.ds_config, plan.deepspeed)
    write_json(run.provenance, {"attempt": attempt} | provenance)
    if not plan.cluster.local:
        run.hostfile.write_text(hostfile_text(plan))
    write_json(run.plan, plan.to_json())
    return attempt


def _drop_later_records(path: Path, step: int, kept: Path) -> None:
    """Moves the records of steps after the checkpoint's out of a file of the run: they will be made again."""
    if not path.exists():
        return
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    later = [line for line in lines if json.loads(line)["step"] > step]
    if later:
        write_text(kept / f"{path.stem}_dropped.jsonl", "\n".join(later) + "\n")
    write_text(path, "".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step))


def end(run: RunDir, plan: Plan, ending: Ending, attempt: int) -> dict[str, Any]:
    """Writes summary.json, or says that it could not; what is in it."""
    result = read_json(run.result) or {}
    failure = ending.failure
    summary = {
        "exit_code": ending.exit_code,
        "attempt": attempt,
        "status": {0: "done", 5: "failed"}.get(ending.exit_code, "stopped"),
        **result,
        "memory": _memory(plan, result.get("memory")),
        "audit_findings": None if (audit := read_json(run.audit)) is None else len(audit["findings"]),
        "planned_model_state_bytes": sum(plan.estimate.device_bytes.values()) or None,
        "failure": None
        if failure is None
        else {
            **{"rank": failure.rank, "host": failure.host, "kind": failure.kind},
            **{"message": failure.message, "log": str(failure.log)},
        },
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if not try_write(write_json, run.summary, summary):
        render.note(f"{run.summary} could not be written")
    return summary


def _memory(plan: Plan, measured: dict[str, Any] | None) -> dict[str, Any] | None:
    """Planned memory beside what the ranks measured; None where either is missing."""
    memory, config = plan.estimate.memory, plan.config
    if memory is None or measured is None:
        return None
    counted = memory.measured or (config.peft.kind == "none" and not config.parameters.frozen)
    exact = counted and "nvme" not in (plan.offload_device("optimizer"), plan.offload_device("param"))
    return surprise.compared(memory, surprise.Setting(plan.zero_stage, plan.world_size), exact, measured)
