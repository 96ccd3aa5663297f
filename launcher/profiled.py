"""Keeps what recipe=profile measured, in the run's folder and for this user, and gives it to later plans.

Called by `launcher.run` at a run's end and by `launcher.cli` before a plan. Files are named after the device.
Must never go before hardware that a request names: only one that names none gets what was measured.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from pathlib import Path
from typing import Any

from launcher import env
from launcher.cluster.value import Cluster, resolve
from launcher.errors import UserError
from launcher.machine import device_name
from launcher.plan import Plan
from launcher.planner.correction import correction
from launcher.planner.hardware import KNOWN, problems, read
from launcher.rundir import RunDir, read_json, write_json
from launcher.schema import RunConfig

NONE = "none"


def keep(run: RunDir, plan: Plan, result: dict[str, Any]) -> list[str]:
    """Writes hardware.json and, where the ranks ran on this machine, the user's copy; says in lines what it holds."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    content = correction(plan, result, today)
    write_json(run.hardware, content)
    lines = [f"measured:  {name} {content[name]:.4g}" for name in KNOWN if name in content]
    lines.append(f"hardware:  {run.hardware} (hardware.file=FILE plans with it)")
    name = device_name(plan.cluster) if plan.cluster.local else None
    if name is not None:
        file = _file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, content | {"device": name})
        lines.append(f"           plans on this machine use it from now on: {file}")
    return lines


def with_measured(config: RunConfig, origin: dict[str, str]) -> tuple[RunConfig, dict[str, str]]:
    """The request with what was measured on this machine, and where its options come from; both as they are if nothing.

    The numbers go into the request itself, so that a plan does not change when another run measures anew.
    """
    section = config.hardware
    named = section.name != NONE or any(getattr(section, name) is not None for name in ("file", *KNOWN))
    if named or not _folder().is_dir():
        return config, origin
    file = _known(config)
    if file is None:
        return config, origin
    measured = dataclasses.replace(section, file=str(file))
    if problems(measured):  # of another version: it is as if nothing had been measured
        return config, origin
    content = read_json(file)
    label = f"{content['device']}, measured by recipe=profile on {content['date']} with model={content['model']}"
    known = dataclasses.replace(read(measured), name=label, file=None)
    numbers = [name for name in KNOWN if getattr(known, name) is not None]
    source = dict.fromkeys((f"hardware.{name}" for name in ("name", *numbers)), f"solved: {file}")
    return dataclasses.replace(config, hardware=known), origin | source


def _known(config: RunConfig) -> Path | None:
    """The file of the device that a local request runs on."""
    try:
        cluster: Cluster = resolve(config.cluster, config.launch)
    except UserError:  # told where the plan is judged
        return None
    name = device_name(cluster) if cluster.local else None
    file = None if name is None else _file(name)
    return file if file is not None and file.is_file() else None


def _folder() -> Path:
    return env.cache_dir() / "hardware"


def _file(name: str) -> Path:
    return _folder() / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
