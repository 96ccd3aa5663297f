"""`recipe=export`: a job writes and checks the files, another reloads the model; then the folder gets its name.

Called by `launcher.cli` for a run, or for a checkpoint that no run of ours wrote.
Must never give the target its name before everything that was asked for has been checked.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from launcher import render, run
from launcher.errors import EXIT_OK, Problem, UserError, raise_if
from launcher.plan import Plan
from launcher.rules_request import export_problems
from launcher.rundir import RunDir, write_json
from launcher.schema import RunConfig


def plan(config: RunConfig, old: RunDir | None) -> run.Outcome:
    """Shows what `export` would write; raises UserError for a request that is none."""
    raise_if(export_problems(config.export))
    request = _request(config, old)
    shown = {key: request[key] for key in ("run_dir", "source", "dtype", "dir", "max_shard_bytes", "verify")}
    shown["checkpoint"] = request["source"]
    if old is not None:
        shown["checkpoint"] = run.whole_checkpoint(old, config.export.step, config.export.best)["checkpoint"]
    render.export_plan(shown, as_json=config.plan.format == "json")
    return run.Outcome(EXIT_OK, None, [])


def export(config: RunConfig, old: RunDir | None, trained: Plan | None, ask: run.Ask) -> run.Outcome:
    """Exports a checkpoint of run `old`, or of the folder `export.source`; raises UserError when it cannot.

    `trained`: the plan of `old`. `ask`: the job's process, from `run.worker`.
    """
    raise_if(export_problems(config.export))
    answer = ask(_request(config, old) | {"plan": None if trained is None else trained.to_json()})
    staging, provenance = Path(answer.pop("staging")), answer.pop("provenance")
    if config.export.verify and trained is not None:
        answer["verified"] |= _reloaded(answer, staging, provenance["fixed_batch_loss"], trained)
    write_json(staging / "export.json", answer | provenance)
    _commit(staging, Path(answer["dir"]))
    render.export_done(answer)
    return run.Outcome(EXIT_OK, old.path if old else None, [], answer)


def _request(config: RunConfig, old: RunDir | None) -> dict[str, Any]:
    """What the job is asked. Raises UserError for a foreign checkpoint without a folder to export it to."""
    section = config.export
    if old is None and section.dir is None:
        why = "a checkpoint that no run of ours wrote has no run folder to put it in"
        raise UserError(Problem("export.dir", "null", why, "add export.dir=FOLDER"))
    asked = {"step": section.step, "best": section.best or None, "weights": "ema" if section.weights == "ema" else None}
    if old is None and (name := next((name for name, value in asked.items() if value is not None), None)):
        why = "only a run of ours has it; export.source names a folder"
        raise UserError(Problem(f"export.{name}", str(asked[name]), why, "name the checkpoint's own folder alone"))
    return {
        "run_dir": str(old.path) if old else None,
        "step": section.step,
        "best": section.best,
        "weights": section.weights,
        "source": None if old else section.source,
        "model_config": config.model.config if config.model.path else None,
        "dtype": section.dtype,
        "lora": section.lora,
        "dir": section.dir or str(old.export if old else ""),
        "max_shard_bytes": section.max_shard_bytes,
        "verify": section.verify,
    }


def _reloaded(answer: dict[str, Any], staging: Path, expected: float | None, trained: Plan) -> dict[str, Any]:
    """The loss that the written files have on the checkpoint's fixed batch, or why it was not computed."""
    if expected is None:
        return {"loss": None, "skipped": "the checkpoint records no loss of these weights on a fixed batch"}
    request = {"plan": trained.to_json(), "folder": str(staging), "expected": expected}
    try:
        return run.ask_worker("check_export", request | {key: answer[key] for key in ("dtype", "bytes")})
    except UserError:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _commit(staging: Path, target: Path) -> None:
    """The folder gets its name. An empty folder of that name gives way; anything else stays, and this is an error."""
    os.chmod(staging, 0o755)
    try:
        if target.is_dir():
            target.rmdir()
        os.rename(staging, target)
    except OSError as error:
        why = f"something was put there meanwhile ({error.strerror}); the finished export lies in {staging}"
        raise UserError(Problem("export.dir", str(target), why, f"move {staging} where you want it")) from None
