"""Runs one forward and backward pass of a model without values, and records what is alive at every moment of it.

Called by `recipes.shared.profile` in a process of its own. Tensors are on the meta device: shapes, autograd and the
lifetime of every tensor are the real model's, nothing is computed or allocated.
Must never count a parameter or a parameter's finished gradient: the planner knows those by stage.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.shared.kernels import attention_without_values, experts_of_any_type
from recipes.shared.mixtures import is_mixture, names_of

# What happens, as launcher.planner.profile numbers it: a module's forward begins and ends, its backward begins and
# ends, a parameter's gradient is complete, the loss is there, backward is over.
FORWARD, FORWARD_END, BACKWARD, BACKWARD_END, GRADIENT, LOSS, END = 0, 1, 2, 3, 4, 5, 6
Event = tuple[int, int, int, int]


class Alive(TorchDispatchMode):
    """Bytes of all storages that were made while it is active and still live, and their highest sum since asked."""

    def __init__(self, known: Iterator[torch.Tensor], full: bool) -> None:
        super().__init__()
        self.full = full
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.ignored = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = self.highest = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool and args[0].is_meta:
            return self.full  # what code asks of values: whether every sample fills all positions, as one
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Counts the tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        if storage in self.seen or storage._cdata in self.ignored:
            return
        size = storage.nbytes()
        self.seen.add(storage)
        weakref.finalize(storage, self._freed, size)
        self.now += size
        self.highest = max(self.highest, self.now)

    def _freed(self, size: int) -> None:
        self.now -= size

    def highest_since(self) -> int:
        """The highest sum since the last call."""
        highest, self.highest = self.highest, self.now
        return highest


class Recorder:
    """Hooks on a model that write down its events: (what, index of module or parameter, highest before, now)."""

    def __init__(self, model: nn.Module, alive: Alive, leaves: set[str]) -> None:
        self.alive = alive
        self.events: list[Event] = []
        self.parameters = list(model.parameters())
        self.modules = list(model.modules())
        self.leaves = {m for m in self.modules if is_mixture(m) or names_of(m) & leaves}
        within = {inner for leaf in self.leaves for inner in leaf.modules()} - self.leaves
        for index, module in enumerate(self.modules):
            if module in within:
                continue  # DeepSpeed has no hooks there
            module.register_forward_pre_hook(self._begin(index), with_kwargs=True)
            module.register_forward_hook(self._end(index))
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient(index))

    def note(self, what: int, index: int = -1) -> None:
        """One event at this moment."""
        self.events.append((what, index, self.alive.highest_since(), self.alive.now))

    def _begin(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, named: Any) -> None:
            self.note(FORWARD, index)
            once = _first_call(lambda: self.note(BACKWARD_END, index))
            for tensor in _differentiable((inputs, named)):
                tensor.register_hook(once)

        return hook

    def _end(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self.note(FORWARD_END, index)
            once = _first_call(lambda: self.note(BACKWARD, index))
            for tensor in _differentiable(output):
                tensor.register_hook(once)

        return hook

    def _gradient(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            self.note(GRADIENT, index)
            parameter.grad = None
            self.alive.highest_since()  # what is alive next is alive without it

        return hook


def record(
    model: nn.Module, batch: dict[str, torch.Tensor], full: bool = True, leaves: Collection[str] = ()
) -> dict[str, Any]:
    """Parameters, modules and events of one pass over a batch of meta tensors, for `launcher.planner.profile`.

    `full`: whether the batch stands for samples without padding or packing. `leaves`: classes of modules that are
    gathered as one, beside mixtures.
    {"parameters": [[name, elements, trained]], "modules": [[class, [indices of its own parameters], [of all
    inside], leaf]], "events": [...], "buffer_bytes"}.
    """
    alive = Alive(itertools.chain(model.parameters(), model.buffers(), batch.values()), full)
    recorder = Recorder(model, alive, set(leaves))
    with attention_without_values(), experts_of_any_type(), alive:
        loss = model(**batch).loss
        recorder.note(LOSS)
        loss.backward()
        del loss
        recorder.note(END)
    place = {id(parameter): index for index, parameter in enumerate(recorder.parameters)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        "parameters": [[names[id(p)], p.numel(), p.requires_grad] for p in recorder.parameters],
        "modules": [
            [
                type(module).__name__,
                [place[id(p)] for p in module._parameters.values() if p is not None],
                sorted({place[id(p)] for p in module.parameters()}),
                module in recorder.leaves,
            ]
            for module in recorder.modules
        ],
        "events": recorder.events,
        "buffer_bytes": sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
    }


def _first_call(act: Callable[[], None]) -> Callable[[torch.Tensor], None]:
    done: list[bool] = []

    def hook(gradient: torch.Tensor) -> None:
        if not done:
            done.append(True)
            act()

    return hook


def _differentiable(values: Any) -> Iterator[torch.Tensor]:
    leaves = tree_leaves(dict(values) if isinstance(values, dict) else values)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
