"""Checkpoint -> a folder that `AutoModelForCausalLM.from_pretrained` loads: safetensors, config, tokenizer, provenance.

Run as a job by the launcher: one process, no engine, no GPU.
Must never leave a half folder under the target's name, or replace one that is there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from launcher.errors import Problem, UserError
from launcher.plan import Plan, read_plan
from launcher.rundir import RunDir, write_json
from recipes.shared.checkpoint import manifest
from recipes.shared.checkpoint.reader import Checkpoint, open_checkpoint
from recipes.shared.model import DTYPES, make_config
from recipes.shared.safetensors_writer import Item, write


def run_job(request: dict[str, Any]) -> dict[str, Any]:
    """Exports request["checkpoint"] to request["dir"] as request["dtype"]; answers with what was written."""
    run, source, target = RunDir(request["run_dir"]), Path(request["checkpoint"]), Path(request["dir"])
    plan = read_plan(run.plan)
    _refuse_existing(target)
    checkpoint = open_checkpoint(source)
    items = _items(checkpoint, DTYPES[request["dtype"]])
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        files = write(items, staging, request["max_shard_bytes"], _progress(items))
        _write_config(plan, staging, request["dtype"])
        _copy_tokenizer(plan, staging)
        answer = {
            "dir": str(target),
            "dtype": request["dtype"],
            "tensors": len(items),
            "bytes": sum(item.nbytes for item in items),
        }
        write_json(staging / "export.json", answer | _provenance(source, checkpoint, staging, files))
        os.chmod(staging, 0o755)
        if target.is_dir():
            target.rmdir()
        os.rename(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return answer


def _refuse_existing(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            Problem("export.dir", str(target), "it exists and is not empty", "add export.dir=ANOTHER_FOLDER")
        )


def _items(checkpoint: Checkpoint, dtype: torch.dtype) -> list[Item]:
    """Every tensor once. Floating-point weights become `dtype`; buffers keep their own element type."""
    return [
        Item(
            entry.name,
            entry.shape,
            dtype if entry.dtype.is_floating_point and (entry.trainable or entry.numel > 0) else entry.dtype,
            entry.read,
        )
        for entry in checkpoint
    ]


def _write_config(plan: Plan, folder: Path, dtype: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = make_config(plan.config.model.config)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    config.architectures = [architecture] if architecture else None
    config.dtype = DTYPES[dtype]
    config.save_pretrained(folder)


def _copy_tokenizer(plan: Plan, folder: Path) -> None:
    tokenizer = plan.config.data.get("tokenizer")
    if not tokenizer:
        return
    for path in Path(tokenizer).iterdir():
        if (
            path.is_file()
            and path.suffix in (".json", ".model", ".txt", ".jinja")
            and not (folder / path.name).exists()
        ):
            shutil.copy2(path, folder / path.name)


def _provenance(source: Path, checkpoint: Checkpoint, folder: Path, files: list[str]) -> dict[str, Any]:
    saved = manifest.read(source) or {}
    return {
        "checkpoint": str(source),
        "zero_stage": checkpoint.stage,
        "tied": checkpoint.tied,
        "step": saved.get("step"),
        "samples_seen": saved.get("samples_seen"),
        "recorded": saved.get("recorded"),
        "plan_fingerprint": saved.get("plan_fingerprint"),
        "versions": saved.get("versions"),
        "files": {name: manifest.digest(folder / name) for name in files},
    }


def _progress(items: list[Item]) -> Any:
    """A callback that says on stderr, each tenth, how far the export is."""
    total, done, shown = sum(item.nbytes for item in items), 0, 0

    def written(size: int) -> None:
        nonlocal done, shown
        done += size
        tenth = 10 * done // max(total, 1)
        if tenth > shown:
            shown = tenth
            print(f"· exported {done / 1e9:.3f} of {total / 1e9:.3f} GB", file=sys.stderr)

    return written


def describe(folder: Path) -> dict[str, Any]:
    """export.json of an exported folder."""
    return dict(json.loads((folder / "export.json").read_text()))
