"""Saves the training state: shards under a temporary name, manifest last, rename, then `latest`.

Called by the loop on every rank at a step boundary; `latest` and the folder's final name are rank 0's.
Must never leave a folder under its final name that is not whole, or delete anything before the newer one is committed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from launcher.errors import Problem, UserError
from launcher.plan import installed_versions
from launcher.rundir import RunDir, write_text
from recipes.shared import hf_files, lora
from recipes.shared.checkpoint import background, manifest
from recipes.shared.checkpoint.room import refuse_without_room
from recipes.shared.distributed import barrier, meet, say
from recipes.shared.groups import group_names
from recipes.shared.state import TrainState

FULL_DISK_BYTES = 1_000_000
TEMPORARY = ".saving-"


def save(state: TrainState, recorded: dict[str, Any], wait: bool = True) -> Path:
    """Commits a checkpoint of the current step and returns its folder. All ranks; the same call on each.

    `recorded`: newest loss, eval_loss and lr, kept in the manifest. `wait`: whether it must be committed on return, or
    may be written in the background where the plan allows it; the one before always is committed.
    """
    run, final = state.run, state.run.checkpoint(state.step)
    meet(state.ranks, "save", state.plan.config.watch.stall_s / 2)
    finish(state)
    refuse_without_room(state.plan, run, state.ranks)
    say(run, f"saving {final.name}")
    staging = _staging_folder(state)
    with _undone_on_failure(state, staging, final):
        fixed = state.fixed_batch_loss() if state.fixed_batch_loss is not None else None
        described = _manifest(state, recorded) | {"fixed_batch_loss": fixed}
        if state.plan.config.checkpoint.background and not wait:
            _write_in_background(state, staging, final, described)
        else:
            _write(state, staging, final, described)
            state.saved_step = state.step
    return final


def finish(state: TrainState) -> None:
    """Waits until a checkpoint that is written in the background is committed. All ranks."""
    if state.writing is None:
        return
    step, staging = state.writing
    with _undone_on_failure(state, staging, state.run.checkpoint(step)):
        state.writer.finish()
    state.writing = None
    barrier()
    state.saved_step = step


@contextlib.contextmanager
def _undone_on_failure(state: TrainState, staging: Path, final: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        free = shutil.disk_usage(state.run.path).free
        shutil.rmtree(staging, ignore_errors=True)  # on a full disk this is the room in which the failure is recorded
        full = free < FULL_DISK_BYTES or (isinstance(error, OSError) and error.errno == errno.ENOSPC)
        if not full or isinstance(error, UserError):
            raise
        why = f"No space left on device ({free:,} bytes free): this save was undone, the checkpoint before it is whole"
        fix = "make room or lower checkpoint.keep, then go on with recipe=resume"
        raise UserError(Problem("checkpoint", str(final), why, fix)) from error


def _shards(state: TrainState, staging: Path, final: Path) -> None:
    """All ranks: DeepSpeed's files and this rank's generators."""
    state.engine.save_checkpoint(
        str(staging), tag=final.name, client_state={"zerolaunch": {"step": state.step}}, save_latest=False
    )
    torch.save(rng_state(), staging / final.name / rng_name(state.ranks.rank))


def _write(state: TrainState, staging: Path, final: Path, described: dict[str, Any]) -> None:
    """All ranks: shards and generators into `staging`; rank 0 commits."""
    _shards(state, staging, final)
    barrier()
    files = _digests(staging / final.name, state)
    if state.ranks.is_main:
        manifest.write(staging / final.name, described | {"files": files})
        _commit(state.run, staging, final)
        _retain(state, final)
    barrier()


def _write_in_background(state: TrainState, staging: Path, final: Path, described: dict[str, Any]) -> None:
    """All ranks: a snapshot now; a thread of each writes its part, rank 0's commits when it has seen all parts."""
    snapshots = background.Snapshots(state.engine, state.writer.buffers)
    state.engine.checkpoint_engine = snapshots
    try:
        _shards(state, staging, final)
    finally:
        state.engine.checkpoint_engine = snapshots.real
    rank, world_size, main = state.ranks.rank, state.ranks.world_size, state.ranks.is_main

    def work() -> None:
        background.write_part(staging, final.name, rank, snapshots)
        if main:
            files = background.gather_parts(staging, world_size)
            manifest.write(staging / final.name, described | {"files": files})
            _commit(state.run, staging, final)
            _retain(state, final)

    state.writing = (state.step, staging)
    state.writer.start(work)


def rng_name(rank: int) -> str:
    """File of one rank's random generators."""
    return f"rng_rank{rank:05d}.pt"


def rng_state() -> dict[str, Any]:
    """Generators of this process, as plain values and tensors that load without unpickling objects."""
    version, numbers, gauss = random.getstate()
    numpy: tuple[Any, ...] = tuple(np.random.get_state(legacy=True))
    kind, keys, position, has_gauss, cached = numpy
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _staging_folder(state: TrainState) -> Path:
    """A new temporary folder next to the checkpoints, the same on every rank; leftovers of dead saves are removed."""
    name = [f"{TEMPORARY}{state.step:08d}-{uuid.uuid4().hex[:8]}"]
    dist.broadcast_object_list(name, src=0, device=state.ranks.device)
    staging = state.run.checkpoints / name[0]
    if state.ranks.is_main:
        for leftover in state.run.checkpoints.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        staging.mkdir(parents=True)
    barrier()
    return staging


def _digests(folder: Path, state: TrainState) -> dict[str, Any]:
    """Sizes and checksums of every file, each computed (and synced) by one rank."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    mine = {
        name: manifest.digest(folder / name, sync=True) for name in names[state.ranks.rank :: state.ranks.world_size]
    }
    every: list[Any] = [None] * state.ranks.world_size
    dist.all_gather_object(every, mine)
    return {name: entry for part in every for name, entry in sorted(part.items())}


def _manifest(state: TrainState, recorded: dict[str, Any]) -> dict[str, Any]:
    """Everything but the files."""
    plan = state.plan
    shapes = {
        name: list(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in state.engine.module.named_parameters()
    }
    return {
        "format": manifest.FORMAT,
        "step": state.step,
        "samples_seen": state.samples_seen,
        "world_size": state.ranks.world_size,
        "zero_stage": plan.zero_stage,
        "precision": plan.precision,
        "accumulation": plan.accumulation,
        "offload_optimizer": plan.offload_device("optimizer"),
        "offload_param": plan.offload_device("param"),
        "seed": plan.config.run.seed,
        "batch": {"global": plan.batch.global_batch_size, "micro": plan.batch.micro_batch_size},
        "plan_fingerprint": plan.fingerprint,
        "data_digest": state.data_digest,
        "model_config": plan.config.model.config,
        "model_target": plan.config.model.target,
        "hugging_face": hf_files.describe(state.engine.module) if plan.config.model.target is None else None,
        "adapter": lora.describe(state.engine.module),
        "versions": installed_versions(),
        "tracker_run_id": state.tracker_run_id,
        "tracked_as": state.tracked_as,
        "recorded": recorded,
        "best": state.best.recorded(),
        "parameters": shapes,
        "trained": [group for group in group_names(plan, state.engine.module) if group],
    }


def _commit(run: RunDir, staging: Path, final: Path) -> None:
    """The folder gets its name, then `latest` points at it: two atomic renames, each on the disk before the next."""
    for script in staging.glob("*.py"):  # DeepSpeed puts its own conversion scripts beside the tag
        os.replace(script, run.checkpoints / script.name)
    _sync_folder(staging / final.name)
    if final.exists():  # an unfinished or abandoned one of an earlier attempt, at the same step
        os.replace(final, staging / "replaced")
    os.replace(staging / final.name, final)
    _sync_folder(run.checkpoints)
    write_text(run.latest, final.name)
    _sync_folder(run.checkpoints)
    shutil.rmtree(staging, ignore_errors=True)


def _retain(state: TrainState, newest: Path) -> None:
    """Deletes checkpoints beyond `checkpoint.keep`, oldest first; never the newest or the one this run resumed from."""
    keep = state.plan.config.checkpoint.keep
    if keep == 0:
        return
    kept = {newest.name, Path(state.plan.resume_from).name if state.plan.resume_from else newest.name}
    best = (manifest.read(newest) or {}).get("best") or {}  # as it was when that one was begun
    if state.plan.config.checkpoint.best and best.get("step") is not None:
        kept.add(state.run.checkpoint(best["step"]).name)
    for_good = state.plan.config.checkpoint.keep_every
    older = [
        folder
        for folder in manifest.steps(state.run.checkpoints)
        if folder.name not in kept and not (for_good and manifest.step_of(folder) % for_good == 0)
    ]
    for folder in older[max(keep - 1, 0) :]:
        shutil.rmtree(folder, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
