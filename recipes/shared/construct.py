"""Builds any torch module under ZeRO stage 3 with exactly the weights a plain construction gives, one shard per rank.

Called by `recipes.shared.model` on every rank. While the model's own code runs, each finished submodule is cut into
shards; code that touches a sharded parameter (initialisation by a parent, weight tying, edits) finds it whole again.
Must never hold more than a few whole parameters at a time, and never change the order of random draws.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

RESIDENT_BYTES = 64 * 2**20  # whole parameters kept for code that edits several in a row

Read = Callable[[str], torch.Tensor | None]
_T = torch.Tensor
# Questions about a parameter that its placeholder answers: shape and type, not values.
_METADATA = {
    getattr(_T, name).__get__
    for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "grad", "layout", "is_cuda", "is_meta")
} | {
    getattr(_T, name)
    for name in (
        *("size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex"),
        *("requires_grad_", "__hash__", "__len__"),
    )
}
_METADATA |= {_T.requires_grad.__set__, _T.grad.__set__}


@dataclass
class _Shard:
    """This rank's piece of one parameter; `parameter` keeps the object alive so that its id stays its own.

    `data` is None where the value will be read from a folder of weights.
    """

    parameter: nn.Parameter
    shape: torch.Size
    data: torch.Tensor | None


class ShardedConstruction(TorchFunctionMode):
    """Context in which modules are built: `with ShardedConstruction(device): model = Model()`.

    All ranks run the same code with the same seed. Afterwards `partition` hands every parameter to DeepSpeed.
    `drawn`: whether the values that construction gives are wanted; if not, none is kept.
    """

    def __init__(self, device: torch.device, drawn: bool = True) -> None:
        super().__init__()
        self.device, self.drawn = device, drawn
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.shards: dict[int, _Shard] = {}
        self.resident: OrderedDict[int, nn.Parameter] = OrderedDict()
        self.busy = False
        self.peak_resident_bytes = self.freed_bytes = 0

    def __enter__(self) -> ShardedConstruction:
        self.hook = register_module_module_registration_hook(self._on_attach)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.hook.remove()
        self._shed_all()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.busy and func not in _METADATA:
            for value in _parameters_in(args, kwargs):
                if id(value) in self.shards and id(value) not in self.resident:
                    self._load(value)
        return func(*args, **(kwargs or {}))

    def _on_attach(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """A child that is attached has run its own __init__: its parameters can be cut."""
        if child is None:
            return
        for parameter in child.parameters():
            if id(parameter) not in self.shards:
                self._shed(parameter)
        self._trim()

    def partition(
        self, model: nn.Module, dtype: torch.dtype, ds_config: dict[str, Any], read: Read | None = None
    ) -> None:
        """Gives each parameter, cast to `dtype`, to zero.Init in turn: shards land where `ds_config` says.

        `read`: value of the parameter of that name, or None for what construction gave; asked for on rank 0 alone.
        """
        assert self.drawn or read is not None, "no rank has values for these parameters"
        self._shed_all()
        # DeepSpeed makes the groups of hpZ once a process and refuses a second model that does not bring them.
        hpz = ds_config["zero_optimization"].get("zero_hpz_partition_size", 1) > 1
        group = groups._get_zero_param_intra_parallel_group() if hpz else None
        deepspeed.zero.Init(
            module=_Stream(self, model, dtype, read), config_dict_or_path=ds_config, zero_param_parallel_group=group
        )
        self.shards.clear()

    def _shed(self, parameter: nn.Parameter) -> None:
        """Keeps this rank's piece of a whole parameter and leaves a placeholder of the same shape without storage."""
        self.busy = True
        try:
            data = self._mine(parameter.data.detach().reshape(-1)) if self.drawn else None
            self.shards[id(parameter)] = _Shard(parameter, parameter.shape, data)
            parameter.data = torch.empty(1, dtype=parameter.dtype).expand(parameter.shape)
            self.resident.pop(id(parameter), None)
        finally:
            self.busy = False
        self._freed(parameter.numel() * parameter.element_size())

    def _freed(self, size_bytes: int) -> None:
        """Gives freed pages back now and then: the next parameter did not fit the hole of the last, and the whole model
        was in memory though none of it was."""
        self.freed_bytes += size_bytes
        if self.freed_bytes > RESIDENT_BYTES:
            self.freed_bytes = 0
            _trim_heap()

    def _mine(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a flat parameter, padded with zeros to the same number on every rank."""
        piece = math.ceil(flat.numel() / self.world_size)
        mine = flat[self.rank * piece : (self.rank + 1) * piece]
        data = torch.zeros(piece, dtype=flat.dtype)
        data[: mine.numel()] = mine
        return data

    def _load(self, parameter: nn.Parameter) -> None:
        """Makes one parameter whole on every rank (collective: every rank runs the same construction code)."""
        self.busy = True
        try:
            self._trim()
            shard = self.shards[id(parameter)]
            if shard.data is None:
                parameter.data = torch.empty(shard.shape, dtype=parameter.dtype)
            else:
                mine = shard.data.to(self.device)
                whole = torch.empty(mine.numel() * self.world_size, dtype=mine.dtype, device=self.device)
                dist.all_gather_into_tensor(whole, mine)
                parameter.data = whole[: shard.shape.numel()].view(shard.shape).to("cpu")
            self.resident[id(parameter)] = parameter
            self.peak_resident_bytes = max(self.peak_resident_bytes, self._resident_bytes())
        finally:
            self.busy = False

    def _resident_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.resident.values())

    def _trim(self) -> None:
        while len(self.resident) > 1 and self._resident_bytes() > RESIDENT_BYTES:
            self._shed(next(iter(self.resident.values())))

    def _shed_all(self) -> None:
        for parameter in list(self.resident.values()):
            self._shed(parameter)


class _Stream(nn.Module):
    """Looks like a module to zero.Init; its parameters become whole only when they are asked for."""

    def __init__(
        self, construction: ShardedConstruction, model: nn.Module, dtype: torch.dtype, read: Read | None
    ) -> None:
        super().__init__()
        self.stream = (construction, model, dtype, read)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        construction, model, dtype, read = self.stream
        for name, parameter in model.named_parameters():
            if id(parameter) in construction.shards:
                construction._load(parameter)
                construction.resident.pop(id(parameter))
                del construction.shards[id(parameter)]
            if read is not None and construction.rank == 0:  # zero.Init broadcasts rank 0's
                value = read(name)
                parameter.data = parameter.data if value is None else value
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
            shape = parameter.shape
            parameter.data = parameter.data.reshape(-1) if parameter.dim() == 0 else parameter.data
            yield parameter
            parameter.ds_shape = shape  # DeepSpeed 0.19.8 cannot broadcast a scalar, but gathers one by its shape
            construction._freed(shape.numel() * parameter.element_size())


def _trim_heap() -> None:
    """Gives the pages of freed whole parameters back: shards lie between them, and a third of the memory was holes."""
    with contextlib.suppress(AttributeError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)


def _parameters_in(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Iterator[nn.Parameter]:
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _parameters_in(tuple(value), None)
