"""Checkpoint -> a folder that `AutoModelForCausalLM.from_pretrained` loads: safetensors, config, tokenizer, provenance.

Run as a job by the launcher: one process, no engine, no GPU. The folder keeps a temporary name, which the answer
tells; the launcher gives it its own once it is checked. An export that was cut off is continued at the next file.
Must never put anything under the target's name, or replace what is there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from launcher.errors import Problem, UserError
from launcher.plan import Plan, read_plan
from launcher.rundir import RunDir, existing_parent, read_json, write_json
from recipes.shared.checkpoint import find, foreign, manifest
from recipes.shared.checkpoint.average import KEY as AVERAGE
from recipes.shared.checkpoint.average import averaged
from recipes.shared.checkpoint.reader import BUFFER, Checkpoint, Entry, open_checkpoint
from recipes.shared.hf_config import DTYPES
from recipes.shared.hf_files import CONFIG, GENERATION, TEMPLATE, copy_tokenizer, described_in, write_model_config
from recipes.shared.lora import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, Merged, base_name, exported
from recipes.shared.progress import Progress
from recipes.shared.safetensors_writer import Item, Shard, checksum, layout, write_index, write_shard

PART_ELEMENTS = 2**23  # 32 MiB of fp32: what a thread holds of a tensor that changes its element type
THREADS = 8
PROGRESS, LOCK = "progress.json", "lock"
OWN_MODEL = "model.json"  # the target and keyword arguments of a module of the user's own


def run_job(request: dict[str, Any]) -> dict[str, Any]:
    """Exports what `request` names into a folder beside request["dir"]; answers with what was written, and where."""
    target = Path(request["dir"])
    refuse_existing(target)
    source = _source(request)
    checkpoint = open_checkpoint(source.shards)
    if request["weights"] == AVERAGE:
        checkpoint = averaged(checkpoint, source.shards)
    items = [_item(entry, DTYPES[request["dtype"]]) for entry in exported(checkpoint, source.adapter, request["lora"])]
    alone = request["lora"] == ADAPTER
    shards = layout(items, request["max_shard_bytes"])
    if alone:
        shards = [_only(shards, request["max_shard_bytes"])]
    wanted = _identity(source.shards, request)
    with _staging(target) as staging:
        done = _continued(staging, wanted)
        _refuse_small_disk(target, shards, done)
        started = time.perf_counter()
        _write(shards, staging, done, wanted)
        copy_s = time.perf_counter() - started
        _write_model_files(source, request["dtype"], staging, alone)
        if request["verify"]:
            _verify(shards, staging, done)
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


def _source(request: dict[str, Any]) -> _Source:
    """Of a run: its newest whole checkpoint, or the one that is named, if it is whole. Else the named folder."""
    if request["source"] is not None:
        place = foreign.locate(Path(request["source"]), "export.source")
        described = described_in(place.model) if place.model else None
        if request["model_config"] is not None:
            described = (described or {GENERATION: None}) | {CONFIG: request["model_config"]}
        return _Source(place.shards, described, place.model)
    run = RunDir(request["run_dir"])
    plan: Plan = read_plan(run.plan)
    shards = find.chosen(run, request["step"], request["best"])
    model = Path(plan.config.model.path or plan.config.model.init_from or os.devnull)
    tokenizer = plan.config.data.get("tokenizer") or (model.parent if model.is_file() else model)
    saved = manifest.read(shards) or {}
    target, template = saved.get("model_target"), plan.config.data.get("chat_template")
    own = None if target is None else {"target": target, "config": saved["model_config"]}
    return _Source(shards, saved["hugging_face"], Path(tokenizer), saved.get("adapter"), own, template)


def _item(entry: Entry | Merged, dtype: torch.dtype) -> Item:
    """Floating-point weights become `dtype`; buffers keep their own element type."""
    kept = entry.kind == BUFFER or not entry.dtype.is_floating_point
    return Item(entry.name, entry.shape, entry.dtype if kept else dtype, lambda: _parts(entry, kept, dtype))


def _parts(entry: Entry | Merged, kept: bool, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for part in entry.parts(PART_ELEMENTS):
        if not kept and dtype == torch.float16 and bool((part.abs() > torch.finfo(dtype).max).any()):
            why = f"{entry.name} has values beyond fp16's range, which would become infinite"
            raise UserError(Problem("export.dtype", "fp16", why, "use export.dtype=bf16 or fp32"))
        yield part


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """The temporary folder of this target, for one process at a time; an interrupted export's is taken up again."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.exporting")
    staging.mkdir(exist_ok=True)
    with (staging / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = "another export is writing it at this moment"
            raise UserError(Problem("export.dir", str(target), why, "wait, or add export.dir=ANOTHER_FOLDER")) from None
        yield staging
        (staging / LOCK).unlink()


def _identity(shards: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What an export that was cut off must have been made from to be continued."""
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(shards.glob("*.pt"))}
    return {"checkpoint": str(shards), "files": files} | {
        key: request[key] for key in ("dtype", "lora", "max_shard_bytes", "weights")
    }


def _continued(staging: Path, wanted: dict[str, Any]) -> dict[str, dict[str, str]]:
    """{file: checksums of its tensors} of what an earlier attempt at the same finished; anything else is removed."""
    progress = read_json(staging / PROGRESS) or {}
    done = progress["done"] if progress.get("made_from") == wanted else {}
    done = {file: digests for file, digests in done.items() if (staging / file).is_file()}
    for path in staging.iterdir():
        if path.name not in (LOCK, *done):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_json(staging / PROGRESS, {"made_from": wanted, "done": done})
    return done


def _refuse_small_disk(target: Path, shards: list[Shard], done: dict[str, Any]) -> None:
    needed = sum(item.nbytes for shard in shards if shard.file not in done for item in shard.items)
    free = shutil.disk_usage(existing_parent(target)).free
    if needed > free:
        why = f"{needed / 1e9:.3f} GB are to be written, {free / 1e9:.3f} GB are free"
        raise UserError(Problem("export.dir", str(target), why, "make room, or add export.dir=A_FOLDER_ELSEWHERE"))


def _write(shards: list[Shard], staging: Path, done: dict[str, dict[str, str]], wanted: dict[str, Any]) -> None:
    """Every file that is not there yet; `done` gets its checksums."""
    missing = [shard for shard in shards if shard.file not in done]
    with Progress("exported", sum(item.nbytes for shard in missing for item in shard.items)) as progress:
        for shard in missing:
            done[shard.file] = write_shard(shard, staging, _threads(), progress.advance)
            write_json(staging / PROGRESS, {"made_from": wanted, "done": done})
    write_index(shards, staging)


def _verify(shards: list[Shard], staging: Path, done: dict[str, dict[str, str]]) -> None:
    """Every file is read again, by the library that its readers use, and compared with what the checkpoint gave."""
    total = sum(item.nbytes for shard in shards for item in shard.items)
    with Progress("verified", total) as progress, ThreadPoolExecutor(_threads()) as pool:
        for shard in shards:
            file: Any = safe_open(staging / shard.file, "pt")
            odd = set(file.keys()) ^ {item.name for item in shard.items}

            def differs(item: Item, file: Any = file, odd: set[str] = odd, shard: Shard = shard) -> bool:
                tensor = None if item.name in odd else file.get_tensor(item.name)
                same = tensor is not None and (tuple(tensor.shape), tensor.dtype) == (item.shape, item.dtype)
                progress.advance(item.nbytes)
                return not same or checksum(tensor) != done[shard.file][item.name]

            odd |= {item.name for item, wrong in zip(shard.items, pool.map(differs, shard.items), strict=True) if wrong}
            if odd:
                raise _differs(staging, shard, ", ".join(sorted(odd)[:3]))


def _threads() -> int:
    return min(THREADS, len(os.sched_getaffinity(0)))


def _differs(staging: Path, shard: Shard, what: str) -> UserError:
    shutil.rmtree(staging)
    why = f"{what} in {shard.file} is not what was read from the checkpoint"
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
        "files": {file: {"bytes": (folder / file).stat().st_size, "tensors_xxh3_128": done[file]} for file in done},
    }
