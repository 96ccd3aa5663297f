"""Every function of torch that is given a parameter -> a finding where that is an empty shard.

Entered while an audit watches, on every rank. Sees what Python asks in the thread that trains.
Must never change what a function returns, or ask a parameter anything that has an effect.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from recipes.shared.audit.findings import Findings
from recipes.shared.audit.origin import Origin, accused
from recipes.shared.audit.register import Register

# What an empty placeholder answers truly.
_TRUE = {
    *("dtype", "device", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_mps"),
    *("is_xpu", "is_quantized", "is_nested", "grad_fn", "name", "names", "output_nr", "_version", "itemsize"),
    *("element_size", "is_floating_point", "is_complex", "is_inference", "get_device", "__hash__", "_backward_hooks"),
    *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "_post_accumulate_grad_hooks", "_grad_fn"),
    *("_base", "_is_view", "is_signed", "_cdata", "__repr__", "retains_grad", "_has_symbolic_sizes_strides"),
}
_SIZE = {
    *("shape", "ndim", "size", "dim", "ndimension", "numel", "nelement", "stride", "__len__", "data_ptr", "nbytes"),
    *("is_contiguous", "storage_offset"),
}
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "and", "or", "xor")}
# They ask for a gradient to drop it, or are found by another name.
_NO_QUESTION = {"zero_grad", "_apply", "__deepcopy__", "_init_group"}
# Functions on the way from the user's line to torch that tell what the line is about.
_BY_WAY = {
    "deepcopy": "copy",
    "__deepcopy__": "copy",
    "_save_to_state_dict": "state_dict",
    "_load_from_state_dict": "load",
    "load_state_dict": "load",
    "__reduce_ex__": "save",
    "_apply": "write",
}


class Access(TorchFunctionMode):
    """Context in which the user's code runs: `register` knows the parameters, `findings` takes what is wrong."""

    def __init__(self, register: Register, findings: Findings) -> None:
        super().__init__()
        self.register, self.findings = register, findings

    def leave(self) -> None:
        """Takes this context away from among others, which may have been entered since and not left."""
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in _tensors(args, kwargs):
            if hasattr(value, "ds_status"):
                self._look(func, value, args)
        if self.register.open_gathers and _writes(func, kwargs):
            self._note_write(args[0] if args else next(iter((kwargs or {}).values()), None))
        return func(*args, **(kwargs or {}))

    def _look(self, func: Callable[..., Any], parameter: Any, args: tuple[Any, ...]) -> None:
        name = _name(func)
        if name in ("requires_grad", "requires_grad_"):
            self._switch(func, parameter, args)
        elif name in _TRUE:
            return
        elif name == "grad":
            self._gradient(func, parameter)
        elif parameter.ds_status != ZeroParamStatus.AVAILABLE:
            origin = accused(sys._getframe(2))
            if origin is not None:
                self._report(self._kind(func, name, origin, parameter), parameter, origin)
        elif name not in _SIZE and self.register.is_foreign(parameter):
            origin = accused(sys._getframe(2))
            if origin is not None:
                self._report("external", parameter, origin)

    def _kind(self, func: Callable[..., Any], name: str, origin: Origin, parameter: Any) -> str:
        way = next((kind for step, kind in _BY_WAY.items() if step in origin.through), None)
        if way is not None:
            return way
        if name == "__reduce_ex__":
            return "save"
        if name == "__deepcopy__":
            return "copy"
        if name in _SIZE:
            return "size"
        if self.register.is_foreign(parameter):
            return "external"
        if "_call_impl" in origin.through and not self.register.knows(parameter):
            return "no_engine"
        if name == "data" and func.__name__ == "__get__":
            return "data"
        return "write" if _writes(func, None) else "read"

    def _report(self, kind: str, parameter: Any, origin: Origin) -> None:
        self.findings.add(kind, self.register.name(parameter), origin.line)

    def _switch(self, func: Callable[..., Any], parameter: Any, args: tuple[Any, ...]) -> None:
        """requires_grad, set to another value once the engine knows the parameter."""
        getter = getattr(func, "__name__", "") == "__get__"
        if getter or not self.register.knows(parameter):
            return
        wanted = bool(args[1]) if len(args) > 1 else True
        origin = accused(sys._getframe(3)) if wanted != self.register.trained(parameter) else None
        if origin is not None:
            self._report("requires_grad", parameter, origin)

    def _gradient(self, func: Callable[..., Any], parameter: Any) -> None:
        if func.__name__ != "__get__" or not self.register.knows(parameter) or not parameter.requires_grad:
            return
        gradient = parameter.grad
        if gradient is None or gradient.numel() != parameter.ds_numel:
            origin = accused(sys._getframe(3))
            if origin is not None and not _NO_QUESTION & origin.through:
                self._report("gradient", parameter, origin)

    def _note_write(self, target: Any) -> None:
        """A write in a gather: of a parameter, or of anything that lies in one's memory."""
        if isinstance(target, list | tuple):
            for part in target:
                self._note_write(part)
        elif isinstance(target, torch.Tensor) and target.numel() and not target.is_meta:
            origin = accused(sys._getframe(2))
            if origin is not None and origin.line is not None:
                self.register.note_write(target.data_ptr(), origin.line)


def _name(func: Callable[..., Any]) -> str:
    """That of the attribute for a getter or setter."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def _writes(func: Callable[..., Any], kwargs: dict[str, Any] | None) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    setter = name == "__set__" and _name(func) == "data"
    return (
        in_place
        or setter
        or name in _IN_PLACE
        or name == "__setitem__"
        or bool(kwargs and kwargs.get("out") is not None)
    )


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(tuple(value), None)
