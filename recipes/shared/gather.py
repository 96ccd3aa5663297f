"""Parameters that may lie in shards -> whole ones, to read or to edit; the one place that gathers them.

Called on every rank, at any stage, before or after the engine stands: all ranks take part in every call.
Must never keep more parameters whole than it was asked for, nor let an edit vanish.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR as DEPTH
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.errors import Problem, UserError
from recipes.shared import masters

AT_MOST_BYTES = 256 * 2**20  # of parameters that are whole at the same time
Parameters: TypeAlias = Iterable[nn.Parameter] | nn.Parameter


@contextlib.contextmanager
def read(parameters: Parameters) -> Iterator[None]:
    """Within the block `parameters` are whole on every rank, and nothing may write to them. All ranks.

    Raises UserError at a write: DeepSpeed would drop it at stage 3. Blocks may lie within one another.
    """
    listed = _listed(parameters)
    with _whole(listed), _ReadOnly(listed):
        yield


@contextlib.contextmanager
def edit(parameters: Parameters) -> Iterator[None]:
    """Within the block `parameters` are whole and may be changed in place. All ranks.

    Every rank may run the same edit, or rank 0 alone: rank 0's is what all have afterwards. What the optimizer steps
    (fp32 masters) follows where an element changed. An edit of a block that raises is dropped at stage 3.
    Raises UserError for a parameter that a block around this one made whole.
    """
    listed = _listed(parameters)
    nested = [parameter for parameter in listed if getattr(parameter, DEPTH, 0)]
    if nested:
        why = "a block around this one made it whole, and would drop the edit"
        raise UserError(Problem("gather.edit", _described(nested[0]), why, "edit before or after that block"))
    context = _gathered(listed, modifier_rank=0)
    with context, torch.no_grad():
        before = [None if (part := masters.piece(parameter)) is None else part.clone() for parameter in listed]
        try:
            yield
        except BaseException:
            context.src_rank = None  # no broadcast: other ranks may not come to it
            raise
        if dist.is_initialized() and dist.get_world_size() > 1:
            for parameter in listed:
                dist.broadcast(parameter.data, 0)
        for parameter, old in zip(listed, before, strict=True):
            if old is not None:
                masters.refresh(parameter, old)


def stream(model: nn.Module, at_most_bytes: int = AT_MOST_BYTES) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, whole parameter) of each of the model's parameters, tied ones once. All ranks, to the end.

    At most `at_most_bytes` are whole at a time, or one parameter; each until the next is asked for, to be read only:
    raises UserError for one that was written to.
    """
    for group in _groups(model, at_most_bytes):
        with _whole([parameter for _, parameter in group]):
            for name, parameter in group:
                version = parameter._version
                yield name, parameter
                if parameter._version != version:
                    raise _written(name)


def norms(model: nn.Module) -> dict[str, float]:
    """{name: L2 norm} of every parameter, in fp64. All ranks."""
    return {name: float(torch.linalg.vector_norm(p.detach(), dtype=torch.float64)) for name, p in stream(model)}


def full_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient averaged over ranks, whole, fp32, on every rank; under fp16 times the loss scale. All ranks.

    To be asked for after the last backward of a step and before `engine.step()`; None for a frozen parameter.
    """
    return masters.full_gradient(parameter)


def optimizer_state(parameter: nn.Parameter, key: str) -> torch.Tensor | None:
    """The optimizer's `key` (Adam: exp_avg, exp_avg_sq) of a parameter, whole, fp32, on every rank. All ranks.

    None before the optimizer's first step and for a frozen parameter.
    """
    return masters.full_state(parameter, key)


@dataclass(frozen=True)
class Counts:
    """Elements of a model's parameters, each tensor once however many modules share it."""

    total: int
    trainable: int


def parameter_counts(model: nn.Module) -> Counts:
    """The same at every stage. Any rank; nothing is gathered."""
    sizes = [(numel(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return Counts(sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained))


def numel(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter. Any rank; nothing is gathered."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of the whole parameter. Any rank; nothing is gathered."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


# --- how ------------------------------------------------------------------------------------------------------------


def _listed(parameters: Parameters) -> list[nn.Parameter]:
    """Each once. A parameter is itself iterable, row by row."""
    given = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    return list({id(parameter): parameter for parameter in given}.values())


def _gathered(parameters: list[nn.Parameter], modifier_rank: int | None = None) -> Any:
    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank)


def _whole(parameters: list[nn.Parameter]) -> Any:
    """Those that no block around this one made whole, gathered: DeepSpeed refuses the others."""
    return _gathered([parameter for parameter in parameters if not getattr(parameter, DEPTH, 0)])


def _groups(model: nn.Module, at_most_bytes: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    group: list[tuple[str, nn.Parameter]] = []
    held = 0
    for name, parameter in model.named_parameters():
        size = numel(parameter) * parameter.element_size()
        if group and held + size > at_most_bytes:
            yield group
            group, held = [], 0
        group.append((name, parameter))
        held += size
    if group:
        yield group


def _described(parameter: nn.Parameter) -> str:
    return f"a parameter of shape {list(shape(parameter))}"


def _written(got: str) -> UserError:
    why = "it is written to in a block that reads: at stage 3 DeepSpeed drops such a change"
    return UserError(Problem("gather.read", got, why, "write inside `with gather.edit(parameters):`, on every rank"))


class _ReadOnly(TorchDispatchMode):
    """Refuses every operator that writes into the memory of one of `parameters`, under whatever name it is reached."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        spans = sorted((p.data_ptr(), p.numel() * p.element_size(), number) for number, p in enumerate(parameters))
        self.starts = [start for start, _, _ in spans]
        self.spans = [(start + size, parameters[number]) for start, size, number in spans]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else (kwargs or {}).get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    self._refuse(tensor)
        return func(*args, **(kwargs or {}))

    def _refuse(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0 or tensor.is_meta:
            return
        place = bisect.bisect_right(self.starts, tensor.data_ptr()) - 1
        if place >= 0 and tensor.data_ptr() < self.spans[place][0]:
            raise _written(_described(self.spans[place][1]))
