"""The manifest of a checkpoint: what it holds, with sizes and checksums. Torch-free.

Written last by `save`; read by `find` to tell a whole checkpoint from a broken one, and by `load` and export.
Must never be trusted without its files: `problem_of` compares every one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import xxhash

from launcher.plan import Plan
from launcher.rundir import STEP_PREFIX, read_json

NAME = "manifest.json"
FORMAT = 1
_CHUNK = 8 * 2**20


def digest(path: Path, sync: bool = False) -> dict[str, Any]:
    """{"bytes", "xxh3_128"} of a file; with `sync` its content is on the disk when this returns."""
    state, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK):
            state.update(chunk)
            size += len(chunk)
    return {"bytes": size, "xxh3_128": state.hexdigest()}


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest in a checkpoint folder, or None when there is none that can be read."""
    value = read_json(folder / NAME)
    return value if isinstance(value, dict) and value.get("format") == FORMAT else None


def layout(manifest: dict[str, Any]) -> tuple[Any, ...]:
    """What a checkpoint's shards fit: world size, stage, precision, accumulation, what is offloaded."""
    keys = ("world_size", "zero_stage", "precision", "accumulation", "offload_optimizer", "offload_param")
    return tuple(manifest.get(key) for key in keys)


def layout_of(plan: Plan) -> tuple[Any, ...]:
    """The same of what a plan will run."""
    devices = (plan.offload_device("optimizer"), plan.offload_device("param"))
    return (plan.world_size, plan.zero_stage, plan.precision, plan.accumulation, *devices)


def problem_of(folder: Path) -> str | None:
    """Why `folder` is not a whole checkpoint; None when every file is there and equal to what was saved."""
    manifest = read(folder)
    if manifest is None:
        return "it has no readable manifest (the save did not end)"
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
    for name, expected in manifest["files"].items():
        if digest(folder / name)["xxh3_128"] != expected["xxh3_128"]:
            return f"{name} differs from what was saved (checksum)"
    return None


def step_of(folder: Path) -> int:
    """Optimizer step of a checkpoint folder, by its name."""
    return int(folder.name.removeprefix(STEP_PREFIX))


def steps(checkpoints: Path) -> list[Path]:
    """Checkpoint folders, newest step first; anything else in there is left alone."""
    found = [
        path
        for path in checkpoints.glob(f"{STEP_PREFIX}*")
        if path.is_dir() and path.name.removeprefix(STEP_PREFIX).isdecimal()
    ]
    return sorted(found, key=step_of, reverse=True)
