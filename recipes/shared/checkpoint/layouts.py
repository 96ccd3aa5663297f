"""What DeepSpeed's stages put into their shards -> entries: where each named tensor's elements lie.

Used by `reader`. The cuts are those of runtime/zero/stage_1_and_2.py, stage3.py and partition_parameters.py.
Must never hold more than one whole parameter, or leave out a piece of one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from launcher.errors import Problem, UserError
from recipes.shared.checkpoint.entries import BUFFER, FROZEN, TRAINED, Checkpoint, Entry, Piece
from recipes.shared.elements import Array


def flat12(shards: list[dict[str, Any]], moment: str | None = None) -> list[list[Array]]:
    """[rank][group]: flat masters, or the moment of that name up to the masters' length."""
    masters: list[list[Array]] = [shard["single_partition_of_fp32_groups"] for shard in shards]
    if moment is None:
        return masters
    return [
        [shard["base_optimizer_state"]["state"][group][moment][: master.size] for group, master in enumerate(of_rank)]
        for shard, of_rank in zip(shards, masters, strict=True)
    ]


def flat3(shards: list[dict[str, Any]], moment: str | None = None) -> list[list[Array]]:
    """[rank][sub-group]: flat masters, or the moment of that name."""
    if moment is None:
        return [shard["fp32_flat_groups"] for shard in shards]
    states = [shard["optimizer_state_dict"]["state"] for shard in shards]
    return [[state[number][moment] for number in sorted(state)] for state in states]


def stage0(model: dict[str, Any], trained: list[str]) -> Checkpoint:
    """Stage 0 keeps the module whole and lists no ties: names that share their elements are tied to the first.

    `trained`: names of the parameters that are not frozen; empty where nobody knows.
    """
    buffers = set(model.get("buffer_names") or ())
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in model["module"].items():
        place = (tensor.__array_interface__["data"][0], tensor.shape, tensor.strides)
        if tensor.size and first.setdefault(place, name) != name:
            tied[name] = first[place]
    own = set(model["module"]) - tied.keys()
    masters = set(trained) or own - buffers
    frozen = own - buffers - masters
    entries = whole(model, masters, TRAINED) + whole(model, frozen, FROZEN) + whole(model, own & buffers, BUFFER)
    return Checkpoint(tuple(entries), tied, 0)


def stage12(model: dict[str, Any], flat: list[list[Array]]) -> list[Entry]:
    """Stages 1 and 2: each group is one flat vector cut into equal parts over the ranks; parameters lie end to end."""
    entries = []
    for group, shapes in enumerate(model["param_shapes"]):
        parts = [of_rank[group] for of_rank in flat]
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + part.size)
        offset = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            pieces = []
            for part, low, high in zip(parts, starts, starts[1:], strict=False):
                start, stop = max(offset, low), min(offset + numel, high)
                if start < stop:
                    pieces.append(Piece(part, start - low, stop - low))
            entries.append(Entry(name, tuple(shape), np.dtype(np.float32), tuple(pieces), TRAINED))
            offset += numel
    return entries


def stage3(model: dict[str, Any], flat: list[list[Array]]) -> list[Entry]:
    """Stage 3: a parameter is cut into ceil(numel / ranks) elements a rank; the cuts lie end to end in sub-groups."""
    world_size = len(flat)
    walks = [_Walk(of_rank) for of_rank in flat]
    entries = []
    for shapes in model["param_shapes"]:
        for name, shape in shapes.items():
            share = math.ceil(math.prod(shape) / world_size)
            pieces = tuple(walk.take(share, name) for walk in walks)
            entries.append(Entry(name, tuple(shape), np.dtype(np.float32), pieces, TRAINED))
    return entries


class _Walk:
    """Hands out consecutive pieces of a rank's sub-groups; a parameter's cut never spans two."""

    def __init__(self, groups: list[Array]) -> None:
        self.groups, self.group, self.offset = groups, 0, 0

    def take(self, count: int, name: str) -> Piece:
        while self.group < len(self.groups) and self.offset == self.groups[self.group].size and count:
            self.group, self.offset = self.group + 1, 0
        if self.group >= len(self.groups) or self.offset + count > self.groups[self.group].size:
            raise UserError(
                Problem(name, f"{count} elements", "the shards end before this parameter", "use another checkpoint")
            )
        piece = Piece(self.groups[self.group], self.offset, self.offset + count)
        self.offset += count
        return piece


def frozen_stage3(models: list[dict[str, Any]]) -> list[Entry]:
    """Stage 3 cuts frozen weights as it cuts masters, each by itself, in the element type of the model."""
    shapes = models[0].get("frozen_param_shapes") or {}
    entries = []
    for name, shape in shapes.items():
        fragments = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
        pieces = tuple(Piece(fragment, 0, fragment.size) for fragment in fragments)
        entries.append(Entry(name, tuple(shape), fragments[0].dtype, pieces, FROZEN))
    return entries


def frozen_whole(model: dict[str, Any]) -> list[Entry]:
    """Stages 1 and 2 keep frozen weights whole in rank 0's module, whether or not they list them apart."""
    known = {name for shapes in model["param_shapes"] for name in shapes}
    known |= set(model.get("buffer_names") or ()) | set(model.get("shared_params") or {})
    return whole(model, set(model["module"]) - known, FROZEN)


def whole(model: dict[str, Any], names: set[str], kind: str) -> list[Entry]:
    """Those of `names` that rank 0's module holds, as it holds them."""
    entries = []
    for name, tensor in model["module"].items():
        if name in names:
            flat = tensor.reshape(-1)
            piece = Piece(flat, 0, flat.size)
            entries.append(Entry(name, tuple(tensor.shape), tensor.dtype, (piece,), kind))
    return entries
