"""Checkpoint -> a folder that `AutoModelForCausalLM.from_pretrained` loads: safetensors, config, tokenizer, provenance.

Run as a job by the launcher: one process, no engine, no GPU. The folder keeps a temporary name, which the answer
tells; the launcher gives it its own once it is checked. An export that was cut off is continued at the next file.
Must never put anything under the target's name, or replace what is there.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from launcher.errors import Problem, UserError
from launcher.plan import Plan
from launcher.rundir import RunDir, existing_parent, write_json
from recipes.shared.adapter_export import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, Merged, base_name, exported
from recipes.shared.checkpoint import find, foreign, manifest
from recipes.shared.checkpoint.average import KEY as AVERAGE
from recipes.shared.checkpoint.average import averaged
from recipes.shared.checkpoint.entries import BUFFER, Checkpoint, Entry
from recipes.shared.checkpoint.reader import open_checkpoint
from recipes.shared.elements import FP16_MAX, OF_PLANS, Array, Element, element, is_floating
from recipes.shared.hf_files import CONFIG, GENERATION, TEMPLATE, copy_tokenizer, described_in, write_model_config
from recipes.shared.progress import Progress
from recipes.shared.safetensors_reader import differing
from recipes.shared.safetensors_writer import Item, Shard, layout, write_index, write_shard
from recipes.shared.staging import PROGRESS, continued, discard, note, staging_of

PART_ELEMENTS = 2**18  # 1 MiB of fp32 stays in a core's cache while it is cast, summed and written; 32 MiB took 4 times
THREADS = 8  # within a file
FILES = 3  # at a time: while one is copied, the one before it is synced, and that before is read back
OWN_MODEL = "model.json"  # the target and keyword arguments of a module of the user's own


def run_job(request: dict[str, Any]) -> dict[str, Any]:
    """Exports what `request` names into a folder beside request["dir"]; answers with what was written, and where.

    A run's checkpoint is compared with its checksums while it is copied, which mostly waits for the disk. Where a file
    differs, nothing of what was made stays, and the checkpoint before it is taken.
    """
    target = Path(request["dir"])
    refuse_existing(target)
    if request["source"] is not None:
        return _export(request, target, _foreign(request))
    run, plan = RunDir(request["run_dir"]), Plan.from_json(request["plan"])
    likely = find.likely(run, request["step"], request["best"])
    if likely is not None:
        try:
            with find.compared(likely):
                return _export(request, target, _of_run(plan, likely))
        except find.Changed:
            discard(target)
    return _export(request, target, _of_run(plan, find.chosen(run, request["step"], request["best"])))


def _export(request: dict[str, Any], target: Path, source: _Source) -> dict[str, Any]:
    """One attempt at it, from `source`."""
    checkpoint = open_checkpoint(source.shards)
    if request["weights"] == AVERAGE:
        checkpoint = averaged(checkpoint, source.shards)
    dtype = element(OF_PLANS[request["dtype"]])
    items = [_item(entry, dtype) for entry in exported(checkpoint, source.adapter, request["lora"])]
    alone = request["lora"] == ADAPTER
    shards = layout(items, request["max_shard_bytes"])
    if alone:
        shards = [_only(shards, request["max_shard_bytes"])]
    wanted = _identity(source.shards, request)
    with staging_of(target) as staging:
        done = continued(staging, wanted)
        _refuse_small_disk(target, shards, done)
        copy_s = _write(shards, staging, done, wanted, request["verify"])
        _write_model_files(source, request["dtype"], staging, alone)
        answer = {
            "dir": str(target),
            "dtype": request["dtype"],
            "tensors": sum(len(shard.items) for shard in shards),
            "bytes": sum(item.nbytes for shard in shards for item in shard.items),
            "described": alone or source.described is not None or source.own is not None,
            "verified": {"tensors": bool(request["verify"])},
        }
        provenance = _provenance(source.shards, checkpoint, staging, done) | {"weights": request["weights"]}
        if request["weights"] == AVERAGE:
            provenance["fixed_batch_loss"] = None  # it is the trained weights'
        os.unlink(staging / PROGRESS)
    return answer | {"copy_s": copy_s, "staging": str(staging), "provenance": provenance}


def _only(shards: list[Shard], max_shard_bytes: int) -> Shard:
    """The one file in which PEFT looks for an adapter; raises UserError where it has to be several."""
    if len(shards) > 1:
        why = "PEFT reads an adapter from one file, and this one is larger"
        raise UserError(Problem("export.max_shard_bytes", str(max_shard_bytes), why, "leave it out"))
    return Shard(ADAPTER_WEIGHTS, shards[0].items)


def refuse_existing(target: Path) -> None:
    """Raises UserError when there is something under the target's name."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            Problem("export.dir", str(target), "it exists and is not empty", "add export.dir=ANOTHER_FOLDER")
        )


class _Source:
    """Shards to read, what describes the model to Hugging Face, where its tokenizer lies, its adapter, how a module of
    the user's own was made, and the chat template it was trained with where that is not the tokenizer's own."""

    def __init__(
        self,
        shards: Path,
        described: dict[str, Any] | None,
        tokenizer: Path | None,
        adapter: dict[str, Any] | None = None,
        own: dict[str, Any] | None = None,
        template: str | None = None,
    ) -> None:
        self.shards, self.described, self.tokenizer, self.adapter = shards, described, tokenizer, adapter
        self.own, self.template = own, template


def _foreign(request: dict[str, Any]) -> _Source:
    """The folder that the request names."""
    place = foreign.locate(Path(request["source"]), "export.source")
    described = described_in(place.model) if place.model else None
    if request["model_config"] is not None:
        described = (described or {GENERATION: None}) | {CONFIG: request["model_config"]}
    return _Source(place.shards, described, place.model)


def _of_run(plan: Plan, shards: Path) -> _Source:
    """The checkpoint `shards` of a run of `plan`."""
    model = Path(plan.config.model.path or plan.config.model.init_from or os.devnull)
    tokenizer = plan.config.data.get("tokenizer") or (model.parent if model.is_file() else model)
    saved = manifest.read(shards) or {}
    target, template = saved.get("model_target"), plan.config.data.get("chat_template")
    own = None if target is None else {"target": target, "config": saved["model_config"]}
    return _Source(shards, saved["hugging_face"], Path(tokenizer), saved.get("adapter"), own, template)


def _item(entry: Entry | Merged, dtype: Element) -> Item:
    """Floating-point weights become `dtype`; buffers keep their own element type."""
    kept = entry.kind == BUFFER or not is_floating(entry.dtype)
    return Item(entry.name, entry.shape, entry.dtype if kept else dtype, lambda: _parts(entry, kept, dtype))


def _parts(entry: Entry | Merged, kept: bool, dtype: Element) -> Iterator[Array]:
    for part in entry.parts(PART_ELEMENTS):
        if not kept and dtype == np.float16 and bool((np.abs(part) > FP16_MAX).any()):
            why = f"{entry.name} has values beyond fp16's range, which would become infinite"
            raise UserError(Problem("export.dtype", "fp16", why, "use export.dtype=bf16 or fp32"))
        yield part


def _identity(shards: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What an export that was cut off must have been made from to be continued."""
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(shards.glob("*.pt"))}
    return {"checkpoint": str(shards), "files": files} | {
        key: request[key] for key in ("dtype", "lora", "max_shard_bytes", "weights")
    }


def _refuse_small_disk(target: Path, shards: list[Shard], done: dict[str, Any]) -> None:
    needed = sum(item.nbytes for shard in shards if shard.file not in done for item in shard.items)
    free = shutil.disk_usage(existing_parent(target)).free
    if needed > free:
        why = f"{needed / 1e9:.3f} GB are to be written, {free / 1e9:.3f} GB are free"
        raise UserError(Problem("export.dir", str(target), why, "make room, or add export.dir=A_FOLDER_ELSEWHERE"))


def _write(
    shards: list[Shard], staging: Path, done: dict[str, dict[str, str]], wanted: dict[str, Any], verify: bool
) -> float:
    """Every file that is not there yet, and what it holds compared with what the checkpoint gave, if `verify`.

    `done` gets the checksums. Returns the seconds until the last file was on the disk.
    """
    missing, started = {shard.file for shard in shards} - done.keys(), time.perf_counter()
    lock, turn = threading.Lock(), threading.Lock()
    sizes = {shard.file: sum(item.nbytes for item in shard.items) for shard in shards}
    copied = [started]

    def finish(shard: Shard) -> set[str]:
        if shard.file in missing:
            digests = write_shard(shard, staging, _threads(), progress.advance, turn)
            with lock:
                copied.append(time.perf_counter())
                done[shard.file] = digests
                note(staging, wanted, done)
        return differing(shard, staging, done[shard.file], _threads(), progress.advance) if verify else set()

    total = sum(sizes[file] for file in missing) + (sum(sizes.values()) if verify else 0)
    what = "written and verified" if verify else "written"
    with Progress(what, total) as progress, ThreadPoolExecutor(FILES) as pool:
        try:
            for shard, result in [(shard, pool.submit(finish, shard)) for shard in shards]:
                if odd := result.result():
                    pool.shutdown(cancel_futures=True)
                    raise _differs(staging, shard, odd)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    write_index(shards, staging)
    return copied[-1] - started


def _threads() -> int:
    return min(THREADS, len(os.sched_getaffinity(0)))


def _differs(staging: Path, shard: Shard, names: set[str]) -> UserError:
    shutil.rmtree(staging)
    why = f"{', '.join(sorted(names)[:3])} in {shard.file} is not what was read from the checkpoint"
    return UserError(Problem("export.verify", str(staging), why, "export again; if it persists, the disk is failing"))


def _write_model_files(source: _Source, dtype: str, staging: Path, alone: bool) -> None:
    """Config, generation config and tokenizer, where they are known; of an adapter `alone`, or a module of the user's
    own, what made it."""
    if source.template is not None:
        shutil.copy2(source.template, staging / TEMPLATE)  # what is there is not replaced by the tokenizer's
    if source.tokenizer is not None and source.tokenizer.is_dir():
        copy_tokenizer(source.tokenizer, staging)
    if alone and source.adapter is not None:
        write_json(staging / ADAPTER_CONFIG, source.adapter["config"])
    elif source.own is not None:
        write_json(staging / OWN_MODEL, source.own)
    elif source.described is not None:
        write_model_config(source.described, dtype, staging)


def _provenance(source: Path, checkpoint: Checkpoint, folder: Path, done: dict[str, dict[str, str]]) -> dict[str, Any]:
    saved = manifest.read(source) or {}
    kept = ("step", "samples_seen", "recorded", "plan_fingerprint", "versions", "fixed_batch_loss")
    return {
        "checkpoint": str(source),
        "zero_stage": checkpoint.stage,
        "tied": {base_name(name): base_name(other) for name, other in checkpoint.tied.items()},
        **{key: saved.get(key) for key in kept},
        "files": {
            file: {"bytes": (folder / file).stat().st_size, "tensors_xxh3_128": done[file]} for file in sorted(done)
        },
    }
