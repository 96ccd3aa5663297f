"""A folder of weights -> named tensors that are read one at a time, matched with the parameters of a model.

Used when a model is built to begin with given weights: Hugging Face's safetensors, or a checkpoint's fp32 masters.
Must never hold more than one tensor and what it is made of, or let a parameter keep a value that nobody gave it.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from launcher.errors import Problem, UserError
from launcher.rundir import RunDir
from recipes.shared.checkpoint import find, foreign, manifest
from recipes.shared.checkpoint.reader import open_checkpoint
from recipes.shared.stored_names import Stored, as_held

WHERE = "model.init_from"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
RECOMPUTED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$|\.attn\.(masked_)?bias$")  # old files hold them
LISTED = 5


def open_weights(path: Path) -> dict[str, Stored]:
    """Every tensor in `path` by name, read from the disk when it is asked for. Raises UserError when there are none."""
    if RunDir(path).exists:
        return _checkpoint(find.newest(RunDir(path)))
    if (path / manifest.NAME).is_file():
        return _checkpoint(find.whole(path))
    if (path / INDEX).is_file():
        files = sorted(set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in files if not (path / name).is_file()]
        if missing:
            why = f"{INDEX} names {len(missing)} files that are not there"
            raise UserError(Problem(WHERE, ", ".join(missing[:LISTED]), why, "copy the whole folder"))
        return {name: stored for file in files for name, stored in _safetensors(path / file).items()}
    if (path / SINGLE).is_file():
        return _safetensors(path / SINGLE)
    if any(path.glob("pytorch_model*.bin")):
        why = "only pickled weights are in it, and reading those may run what they contain"
        raise UserError(Problem(WHERE, str(path), why, "save it as safetensors, where you trust the files"))
    return _checkpoint(foreign.locate(path, WHERE).shards)


def match(model: nn.Module, stored: dict[str, Stored], path: Path) -> dict[str, Stored]:
    """{name of a parameter or persistent buffer of `model`: its tensor}; every one has one, and every tensor is used.

    Names may lack, or have, the prefix of the model's body. Of tied names one is enough. Raises one UserError for
    names that are missing or left over, and for shapes that differ. Any rank; reads no tensor.
    """
    stored = as_held(model, stored)
    names = model.state_dict(keep_vars=True)
    prefix = getattr(model, "base_model_prefix", "") or ""
    found = {name: stored[key] for name in names if (key := _key(name, stored, prefix)) is not None}
    used = {_key(name, stored, prefix) for name in names}
    same: dict[int, list[str]] = {}
    for name, tensor in names.items():
        same.setdefault(id(tensor), []).append(name)
    wanted = {tied[0]: next((found[name] for name in tied if name in found), None) for tied in same.values()}
    _refuse(path, "has no tensor", [name for name, tensor in wanted.items() if tensor is None])
    _refuse(path, "are no part of this model", [k for k in stored if k not in used and not RECOMPUTED.search(k)])
    shapes = {name: tuple(getattr(names[name], "ds_shape", names[name].shape)) for name in wanted}
    matched = {name: tensor for name, tensor in wanted.items() if tensor is not None}
    other = [
        f"{name} {list(t.shape)} for {list(shapes[name])}" for name, t in matched.items() if t.shape != shapes[name]
    ]
    _refuse(path, "are of another shape", other)
    return matched


def load_whole(model: nn.Module, path: Path) -> None:
    """Copies every tensor of the folder into a model that this rank holds whole."""
    names: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, tensor in match(model, open_weights(path), path).items():
        names[name].data.copy_(tensor.read())


def _key(name: str, stored: dict[str, Stored], prefix: str) -> str | None:
    """How the folder calls the tensor that the model calls `name`."""
    spellings = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((spelling for spelling in spellings if spelling in stored), None)


def _refuse(path: Path, why: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        problem = f"{', '.join(names[:LISTED])}{more}: {'it ' if why.startswith('has') else 'these '}{why}"
        raise UserError(Problem(WHERE, str(path), problem, "use the weights with their own configuration: model=hf"))


def _safetensors(file: Path) -> dict[str, Stored]:
    from safetensors import safe_open

    handle: Any = safe_open(file, "pt")  # tensors are views of the mapped file
    return {
        name: Stored(tuple(handle.get_slice(name).get_shape()), functools.partial(handle.get_tensor, name))
        for name in handle.keys()  # noqa: SIM118 - it is no mapping
    }


def _checkpoint(folder: Path) -> dict[str, Stored]:
    return {entry.name: Stored(entry.shape, entry.read) for entry in open_checkpoint(folder)}
