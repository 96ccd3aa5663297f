"""A DeepSpeed checkpoint folder as named tensors: fp32 masters put together from the shards, one parameter at a time.

Used by export and elastic resume. Reads stages 0 to 3 of any world size without an engine; shards stay mapped until
they are read.
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
from recipes.shared.checkpoint import manifest, unpickle

TRAINED, FROZEN, BUFFER = "trained", "frozen", "buffer"
STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}  # runtime/zero/config.py


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of the flat tensor `flat`."""

    flat: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """One stored tensor: where its elements lie, in order, and what it is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    kind: str
    """trained: from fp32 masters; frozen or buffer: as the model has it."""

    @property
    def trainable(self) -> bool:
        """Whether the optimizer has it."""
        return self.kind == TRAINED

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def read(self) -> torch.Tensor:
        """The whole tensor, freshly allocated, in its stored element type."""
        whole = torch.empty(self.numel, dtype=self.dtype)
        self.read_into(whole, 0)
        return whole.view(self.shape)

    def parts(self, at_most: int) -> Iterator[torch.Tensor]:
        """The elements in order, in flat views of the mapped shards of up to `at_most` elements each."""
        left = self.numel
        for piece in self.pieces:
            stop = min(piece.stop, piece.start + left)
            for start in range(piece.start, stop, at_most):
                yield piece.flat[start : min(start + at_most, stop)]
            left -= stop - piece.start
        assert left == 0, f"{self.name}: {left} of {self.numel} elements are missing"

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fills flat `target` with the elements from `start` on; what lies beyond the tensor's end is left alone.

        Only the pages of the shards that hold those elements are read.
        """
        stop = min(start + target.numel(), self.numel)
        offset = 0
        for piece in self.pieces:
            end = min(offset + piece.stop - piece.start, self.numel)
            low, high = max(offset, start), min(end, stop)
            if low < high:
                source = piece.flat[piece.start + low - offset : piece.start + high - offset]
                target[low - start : high - start].copy_(source)
            offset = end
        assert offset == self.numel, f"{self.name}: {offset} of {self.numel} elements"


@dataclass(frozen=True)
class Checkpoint:
    """Every tensor once, in the model's order, and the names that are tied to another."""

    entries: tuple[Entry, ...]
    tied: dict[str, str]
    stage: int

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)


@dataclass(frozen=True)
class OptimizerState:
    """What the shards hold besides masters: `moments` by name, the same entries as the masters' with other elements."""

    moments: dict[str, tuple[Entry, ...]]
    step: int
    groups: list[dict[str, Any]]
    """Hyper-parameters of each parameter group as they were at the last step, its lr among them."""
    schedule: dict[str, Any] | None
    skipped_steps: int


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads the headers of every shard in `folder`. Raises UserError when one is missing or cannot be read."""
    model, states, shards = _open(folder)
    if not shards:
        return _stage0(model, _trained(folder))
    stage = _number(shards[0].get("zero_stage", 1))
    if stage == 3:
        models = [model] + [unpickle.load(path) for path in states[1:]]
        trainable, frozen = _stage3(model, _flat3(shards)), _frozen_stage3(models)
    else:
        trainable, frozen = _stage12(model, _flat12(shards)), _frozen_whole(model)
    buffers = _whole(model, set(model.get("buffer_names") or ()), BUFFER)
    return Checkpoint((*trainable, *frozen, *buffers), dict(model.get("shared_params") or {}), stage)


def open_optimizer(folder: Path) -> OptimizerState:
    """The optimizer's state of every trainable parameter. Raises UserError where it is not element by element.

    A moment is stored as the master is: flat, cut at the same places. Scalars other than the step are not kept.
    """
    model, _, shards = _open(folder)
    if not shards:
        optimizer = model["optimizer"]
        names = _trained(folder) or [entry.name for entry in _stage0(model, []).entries if entry.trainable]
        order = [number for group in optimizer["param_groups"] for number in group["params"]]
        states: list[dict[str, Any]] = [optimizer["state"].get(number, {}) for number in order]
        largest = max(states, key=_most_elements, default={})  # of a parameter of one element nothing can be told
        moments = {}
        for key in _elementwise(largest, None):
            flats = [optimizer["state"][number][key].reshape(-1) for number in order]
            shapes = [tuple(optimizer["state"][number][key].shape) for number in order]
            moments[key] = tuple(
                Entry(name, shape, flat.dtype, (Piece(flat, 0, flat.numel()),), TRAINED)
                for name, shape, flat in zip(names, shapes, flats, strict=True)
            )
        # FusedAdam counts in the state of one parameter of a group only
        step = max((int(values.get("step", 0)) for values in optimizer["state"].values()), default=0)
        return _state(model, optimizer, moments, {"step": step})
    stage = _number(shards[0].get("zero_stage", 1))
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    optimizer = shards[0][key]
    if not isinstance(optimizer, dict) or "state" not in optimizer:
        raise UserError(
            Problem(str(folder), "an optimizer state of another form", "it cannot be laid out anew", "resume as it was")
        )
    masters = _flat3(shards)[0] if stage == 3 else _flat12(shards)[0]
    first = optimizer["state"].get(0, {})
    moments = {}
    for name in _elementwise(first, masters[0].numel()):
        if stage == 3:
            moments[name] = tuple(_stage3(model, _flat3(shards, name)))
        else:
            moments[name] = tuple(_stage12(model, _flat12(shards, name)))
    return _state(model, optimizer, moments, first)


def _state(
    model: dict[str, Any], optimizer: dict[str, Any], moments: dict[str, tuple[Entry, ...]], first: dict[str, Any]
) -> OptimizerState:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer["param_groups"]]
    step = int(first.get("step", groups[0].get("step", 0)) if groups else 0)
    return OptimizerState(moments, step, groups, model.get("lr_scheduler"), int(model.get("skipped_steps") or 0))


def _most_elements(state: dict[str, Any]) -> int:
    return max((value.numel() for value in state.values() if torch.is_tensor(value)), default=0)


def _elementwise(state: dict[str, Any], numel: int | None) -> list[str]:
    """Names of the tensors in one parameter's optimizer state that have an element for each of the parameter's.

    A flat moment may be longer than its master: the master is saved without the padding at its end.
    """
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    return [name for name, value in tensors.items() if value.numel() >= (numel or 2)]


def _open(folder: Path) -> tuple[dict[str, Any], list[Path], list[dict[str, Any]]]:
    """Rank 0's model states, the files of all ranks', and every optimizer shard."""
    states = _numbered(folder, r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
    optimizers = _numbered(folder, r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
    if not states:
        raise UserError(
            Problem(str(folder), "no *_model_states.pt", "not a DeepSpeed checkpoint", "name a step_* folder")
        )
    _refuse_parallel(folder)
    model = unpickle.load(states[0])
    shards = [unpickle.load(path)["optimizer_state_dict"] for path in optimizers]
    world_size = int(model.get("dp_world_size", len(shards) or 1))
    if shards and len(shards) != world_size:
        missing = f"{len(shards)} of {world_size} optimizer shards"
        raise UserError(Problem(str(folder), missing, "shards are missing", "copy every rank's files into one folder"))
    return model, states, shards


def _refuse_parallel(folder: Path) -> None:
    """Raises UserError for files of tensor, pipeline or expert parallelism: rank 0's would be a part of a model."""
    parallel = re.compile(r"mp_rank_(?!00)\d+|expert_|^layer_\d")
    foreign = [path.name for path in folder.glob("*.pt") if parallel.search(path.name)]
    if foreign:
        why = "its parameters are split over ranks by more than ZeRO, and these files hold a part of them"
        fix = "merge it with the library that made it"
        raise UserError(Problem(str(folder), f"{min(foreign)} among {len(foreign)}", why, fix))


def _flat12(shards: list[dict[str, Any]], moment: str | None = None) -> list[list[torch.Tensor]]:
    """[rank][group]: flat masters, or the moment of that name up to the masters' length."""
    masters: list[list[torch.Tensor]] = [shard["single_partition_of_fp32_groups"] for shard in shards]
    if moment is None:
        return masters
    return [
        [
            shard["base_optimizer_state"]["state"][group][moment][: master.numel()]
            for group, master in enumerate(of_rank)
        ]
        for shard, of_rank in zip(shards, masters, strict=True)
    ]


def _flat3(shards: list[dict[str, Any]], moment: str | None = None) -> list[list[torch.Tensor]]:
    """[rank][sub-group]: flat masters, or the moment of that name."""
    if moment is None:
        return [shard["fp32_flat_groups"] for shard in shards]
    states = [shard["optimizer_state_dict"]["state"] for shard in shards]
    return [[state[number][moment] for number in sorted(state)] for state in states]


def _number(value: Any) -> int:
    """A ZeRO stage that may have been saved as a member of DeepSpeed's ZeroStageEnum, by its value or its name."""
    value = value.args[0] if isinstance(value, unpickle.Stub) else value
    return int(STAGES.get(value, value))


def _numbered(folder: Path, pattern: str) -> list[Path]:
    """Files whose whole name matches, ordered by the number in it."""
    found = [(re.fullmatch(pattern, path.name), path) for path in folder.iterdir()]
    matches = [(int(match[1] or 0), path) for match, path in found if match]
    return [path for _, path in sorted(matches)]


def _trained(folder: Path) -> list[str]:
    """Names of the trained parameters in the optimizer's order, where we saved it: stage 0's files lack them."""
    return [name for group in (manifest.read(folder) or {}).get("trained", []) for name in group]


def _stage0(model: dict[str, Any], trained: list[str]) -> Checkpoint:
    """Stage 0 keeps the module whole and lists no ties: names that share their elements are tied to the first.

    `trained`: names of the parameters that are not frozen; empty where nobody knows.
    """
    buffers = set(model.get("buffer_names") or ())
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in model["module"].items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
        if tensor.numel() and first.setdefault(place, name) != name:
            tied[name] = first[place]
    own = set(model["module"]) - tied.keys()
    masters = set(trained) or own - buffers
    frozen = own - buffers - masters
    entries = _whole(model, masters, TRAINED) + _whole(model, frozen, FROZEN) + _whole(model, own & buffers, BUFFER)
    return Checkpoint(tuple(entries), tied, 0)


def _stage12(model: dict[str, Any], flat: list[list[torch.Tensor]]) -> list[Entry]:
    """Stages 1 and 2: each group is one flat vector cut into equal parts over the ranks; parameters lie end to end."""
    entries = []
    for group, shapes in enumerate(model["param_shapes"]):
        parts = [of_rank[group] for of_rank in flat]
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
            entries.append(Entry(name, tuple(shape), torch.float32, tuple(pieces), TRAINED))
            offset += numel
    return entries


def _stage3(model: dict[str, Any], flat: list[list[torch.Tensor]]) -> list[Entry]:
    """Stage 3: a parameter is cut into ceil(numel / ranks) elements a rank; the cuts lie end to end in sub-groups."""
    world_size = len(flat)
    walks = [_Walk(of_rank) for of_rank in flat]
    entries = []
    for shapes in model["param_shapes"]:
        for name, shape in shapes.items():
            share = math.ceil(math.prod(shape) / world_size)
            pieces = tuple(walk.take(share, name) for walk in walks)
            entries.append(Entry(name, tuple(shape), torch.float32, pieces, TRAINED))
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
        entries.append(Entry(name, tuple(shape), fragments[0].dtype, pieces, FROZEN))
    return entries


def _frozen_whole(model: dict[str, Any]) -> list[Entry]:
    """Stages 1 and 2 keep frozen weights whole in rank 0's module, whether or not they list them apart."""
    known = {name for shapes in model["param_shapes"] for name in shapes}
    known |= set(model.get("buffer_names") or ()) | set(model.get("shared_params") or {})
    return _whole(model, set(model["module"]) - known, FROZEN)


def _whole(model: dict[str, Any], names: set[str], kind: str) -> list[Entry]:
    entries = []
    for name, tensor in model["module"].items():
        if name in names:
            flat = tensor.detach().reshape(-1)
            piece = Piece(flat, 0, flat.numel())
            entries.append(Entry(name, tuple(tensor.shape), tensor.dtype, (piece,), kind))
    return entries
