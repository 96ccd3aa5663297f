"""The manifest of a checkpoint: what it holds, with sizes and checksums, its own among them. Torch-free.

Written last by `save`; read by `find` to tell a whole checkpoint from a broken one, and by `load` and export.
Must never be trusted without its files: `problem_of` compares every one.
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from launcher.plan import Plan
from launcher.rundir import STEP_PREFIX, json_text, write_text

NAME = "manifest.json"
FORMAT = 2
_OWN = "own_xxh3_128"  # of the manifest's own text, with nothing in this place
READERS = 8  # files that are read at once: a network file system answers one reader slowly
_CHUNK_BYTES = 2**20  # stays in a core's cache: 8 MiB, allocated anew each time, took twice as long
_OF_RANK = re.compile(r"(?:zero_pp_rank_|rng_rank)(\d+)")  # in names of files that one rank wrote
_NAMED = 5  # of many missing files or ranks, so many are named


def digest(path: Path, sync: bool = False) -> dict[str, Any]:
    """{"bytes", "xxh3_128"} of a file; with `sync` its content is on the disk when this returns."""
    state, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            state.update(buffer[:count])
            size += count
    return {"bytes": size, "xxh3_128": state.hexdigest()}


def write(folder: Path, content: dict[str, Any]) -> None:
    """Writes the manifest, atomically and synced, with a checksum of itself."""
    text = json_text(content | {_OWN: ""})
    write_text(folder / NAME, text.replace(f'"{_OWN}": ""', f'"{_OWN}": "{_digest_of(text)}"'))


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest in a checkpoint folder, or None when there is none, or not the one that was written."""
    try:
        text = (folder / NAME).read_bytes().decode()
        value = json.loads(text)
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        return None
    own = value.pop(_OWN, None)
    return value if own == _digest_of(text.replace(f'"{_OWN}": "{own}"', f'"{_OWN}": ""')) else None


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
    incomplete = incomplete_of(folder)
    if incomplete is not None:
        return incomplete
    files = (read(folder) or {})["files"]
    with ThreadPoolExecutor(min(READERS, len(os.sched_getaffinity(0)))) as pool:
        digests = pool.map(digest, [folder / name for name in files])
        for (name, expected), now in zip(files.items(), digests, strict=True):
            if now["xxh3_128"] != expected["xxh3_128"]:
                pool.shutdown(cancel_futures=True)
                return f"{name} differs from what was saved (checksum)"
    return None


def incomplete_of(folder: Path) -> str | None:
    """The same as far as it shows without reading: None when every file is there and as long as it was."""
    manifest = read(folder)
    if manifest is None:
        there = (folder / NAME).exists()
        return f"{NAME} differs from what was saved" if there else f"{NAME} is missing: the save did not end"
    files = manifest["files"]
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        ranks = sorted({int(found[1]) for name in missing if (found := _OF_RANK.search(name))})
        whose = f", of rank{'s' * (len(ranks) > 1)} {_some(ranks)}" if ranks else ""
        return f"{len(missing)} of {len(files)} files missing{whose}: {_some(missing)}"
    for name, expected in files.items():
        size = (folder / name).stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
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


def _digest_of(text: str) -> str:
    return xxhash.xxh3_128(text.encode()).hexdigest()


def _some(values: list[Any]) -> str:
    """The first few, and how many more there are."""
    more = len(values) - _NAMED
    return ", ".join(map(str, values[:_NAMED])) + (f" and {more} more" if more > 0 else "")
