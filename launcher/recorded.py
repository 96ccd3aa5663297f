"""A run's folder -> the plan it was last started with, by this release or by an earlier one.

Called where a run is continued, exported or cleaned up after. A rank reads the plan of its own start, with `read_plan`.
Must never take a plan that was edited, or give a value to anything but an option that did not exist when it was made.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from launcher import compose
from launcher.errors import Problem, UserError
from launcher.plan import DERIVED, VERSION, Plan, fingerprint
from launcher.rundir import RunDir
from launcher.schema import from_dict


def recorded_plan(run: RunDir) -> Plan:
    """The run's plan. An option that is newer than the run has the value that the stored request has now: its default.

    Raises UserError for a plan that was edited, or that this release cannot read. Composes, inside Hydra's entry.
    """
    value = json.loads(run.plan.read_text(encoding="utf-8"))
    try:
        return Plan.from_json(value)
    except UserError:
        content = {name: item for name, item in value.items() if name not in DERIVED}
        if value.get("version") != VERSION or value.get("fingerprint") != fingerprint(content):
            raise
    today = compose.recompose(run, [], value["config"]["recipe"]["name"])[0]
    value["config"] = _filled(value["config"], dataclasses.asdict(compose.to_run_config(today)))
    try:
        return from_dict(Plan, value)
    except (TypeError, AttributeError, KeyError) as error:
        why = f"it was made by another release, and {error}"
        fix = "go on with that release, or start anew from its weights: model.init_from=CHECKPOINT_FOLDER"
        raise UserError(Problem("plan.json", str(run.plan), why, fix)) from None


def _filled(recorded: Any, today: Any) -> Any:
    """What was recorded, with what only `today` has."""
    if not isinstance(recorded, dict) or not isinstance(today, dict):
        return recorded
    return {name: item for name, item in today.items() if name not in recorded} | {
        name: _filled(item, today.get(name)) for name, item in recorded.items()
    }
