"""A DeepSpeed checkpoint folder as named tensors: fp32 masters put together from the shards, one parameter at a time.

Used by export. Reads stages 0 to 3 of any world size without an engine; shards stay mapped until they are read.
Must never hold more than one whole parameter, and never return one with a piece missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launcher.errors import Problem, UserError
from recipes.shared.checkpoint import unpickle


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of the flat tensor `flat`."""

    flat: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """One stored tensor: where its elements lie, in order. `trainable`: from fp32 masters; else as the model has it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    trainable: bool

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def read(self) -> torch.Tensor:
        """The whole tensor, freshly allocated, in its stored element type."""
        whole = torch.empty(self.numel, dtype=self.dtype)
        offset = 0
        for piece in self.pieces:
            count = min(piece.stop - piece.start, self.numel - offset)
            whole[offset : offset + count] = piece.flat[piece.start : piece.start + count]
            offset += count
        assert offset == self.numel, f"{self.name}: {offset} of {self.numel} elements"
        return whole.view(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """Every tensor once, in the model's order, and the names that are tied to another."""

    entries: tuple[Entry, ...]
    tied: dict[str, str]
    stage: int

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads the headers of every shard in `folder`. Raises UserError when one is missing or cannot be read."""
    states = _numbered(folder, r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
    optimizers = _numbered(folder, r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
    if not states:
        raise UserError(
            Problem(str(folder), "no *_model_states.pt", "not a DeepSpeed checkpoint", "name a step_* folder")
        )
    model = unpickle.load(states[0])
    shards = [unpickle.load(path)["optimizer_state_dict"] for path in optimizers]
    world_size = int(model.get("dp_world_size", len(shards) or 1))
    if shards and len(shards) != world_size:
        missing = f"{len(shards)} of {world_size} optimizer shards"
        raise UserError(Problem(str(folder), missing, "shards are missing", "copy every rank's files into one folder"))
    if not shards:
        return _stage0(model)
    stage = _number(shards[0].get("zero_stage", 1))
    if stage == 3:
        models = [model] + [unpickle.load(path) for path in states[1:]]
        trainable, frozen = _stage3(model, shards), _frozen_stage3(models)
    else:
        trainable, frozen = _stage12(model, shards), _frozen_whole(model)
    buffers = _whole(model, set(model.get("buffer_names") or ()), trainable=False)
    return Checkpoint((*trainable, *frozen, *buffers), dict(model.get("shared_params") or {}), stage)


def _number(value: Any) -> int:
    """An int that may have been saved as a member of an IntEnum of DeepSpeed's."""
    return int(value.args[0] if isinstance(value, unpickle.Stub) else value)


def _numbered(folder: Path, pattern: str) -> list[Path]:
    """Files whose whole name matches, ordered by the number in it."""
    found = [(re.fullmatch(pattern, path.name), path) for path in folder.iterdir()]
    matches = [(int(match[1] or 0), path) for match, path in found if match]
    return [path for _, path in sorted(matches)]


def _stage0(model: dict[str, Any]) -> Checkpoint:
    """Stage 0 keeps the module whole and lists no ties: names that share their elements are tied to the first."""
    buffers = set(model.get("buffer_names") or ())
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in model["module"].items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
        if tensor.numel() and first.setdefault(place, name) != name:
            tied[name] = first[place]
    own = set(model["module"]) - tied.keys()
    entries = _whole(model, own - buffers, trainable=True) + _whole(model, own & buffers, trainable=False)
    return Checkpoint(tuple(entries), tied, 0)


def _stage12(model: dict[str, Any], shards: list[dict[str, Any]]) -> list[Entry]:
    """Stages 1 and 2: each group is one flat vector cut into equal parts over the ranks; parameters lie end to end."""
    entries = []
    for group, shapes in enumerate(model["param_shapes"]):
        parts = [shard["single_partition_of_fp32_groups"][group] for shard in shards]
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + part.numel())
        offset = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            pieces = []
            for part, low, high in zip(parts, starts, starts[1:], strict=False):
                start, stop = max(offset, low), min(offset + numel, high)
                if start < stop:
                    pieces.append(Piece(part, start - low, stop - low))
            entries.append(Entry(name, tuple(shape), torch.float32, tuple(pieces), True))
            offset += numel
    return entries


def _stage3(model: dict[str, Any], shards: list[dict[str, Any]]) -> list[Entry]:
    """Stage 3: a parameter is cut into ceil(numel / ranks) elements a rank; the cuts lie end to end in sub-groups."""
    world_size = len(shards)
    walks = [_Walk(shard["fp32_flat_groups"]) for shard in shards]
    entries = []
    for shapes in model["param_shapes"]:
        for name, shape in shapes.items():
            share = math.ceil(math.prod(shape) / world_size)
            pieces = tuple(walk.take(share, name) for walk in walks)
            entries.append(Entry(name, tuple(shape), torch.float32, pieces, True))
    return entries


class _Walk:
    """Hands out consecutive pieces of a rank's sub-groups; a parameter's cut never spans two."""

    def __init__(self, groups: list[torch.Tensor]) -> None:
        self.groups, self.group, self.offset = groups, 0, 0

    def take(self, count: int, name: str) -> Piece:
        while self.group < len(self.groups) and self.offset == self.groups[self.group].numel() and count:
            self.group, self.offset = self.group + 1, 0
        if self.group >= len(self.groups) or self.offset + count > self.groups[self.group].numel():
            raise UserError(
                Problem(name, f"{count} elements", "the shards end before this parameter", "use another checkpoint")
            )
        piece = Piece(self.groups[self.group], self.offset, self.offset + count)
        self.offset += count
        return piece


def _frozen_stage3(models: list[dict[str, Any]]) -> list[Entry]:
    shapes = models[0].get("frozen_param_shapes") or {}
    entries = []
    for name, shape in shapes.items():
        fragments = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
        pieces = tuple(Piece(fragment, 0, fragment.numel()) for fragment in fragments)
        entries.append(Entry(name, tuple(shape), fragments[0].dtype, pieces, False))
    return entries


def _frozen_whole(model: dict[str, Any]) -> list[Entry]:
    """Stages 1 and 2 keep frozen weights whole in rank 0's module, whether or not they list them apart."""
    known = {name for shapes in model["param_shapes"] for name in shapes}
    known |= set(model.get("buffer_names") or ()) | set(model.get("shared_params") or {})
    return _whole(model, set(model["module"]) - known, trainable=False)


def _whole(model: dict[str, Any], names: set[str], trainable: bool) -> list[Entry]:
    entries = []
    for name, tensor in model["module"].items():
        if name in names:
            flat = tensor.detach().reshape(-1)
            piece = Piece(flat, 0, flat.numel())
            entries.append(Entry(name, tuple(tensor.shape), tensor.dtype, (piece,), trainable))
    return entries
