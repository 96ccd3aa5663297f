"""Reads DeepSpeed's .pt files without running what they may contain: mapped arrays, plain values, inert stubs.

Used by export (and anything else that reads checkpoints without an engine). Loads no torch.
Must never import or call a name that is not on the list: such a file is refused.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher.errors import Problem, UserError
from recipes.shared.checkpoint.container import Container
from recipes.shared.elements import Array, Element, element


class Stub:
    """Stands in for an object of torch's or DeepSpeed's own classes; holds nothing that runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


@dataclass(frozen=True)
class _Storage:
    """Bytes in the file and what they are."""

    bytes: Array
    element: Element


def _member(owner: Any, name: str) -> Stub:
    """`getattr(an enum, the name of a member)`, as Python 3.11.2 and its like write one; nothing is looked up."""
    return Stub(name)


def _tensor(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *rest: Any) -> Array:
    """torch._utils._rebuild_tensor_v2; NumPy refuses what would reach beyond the storage."""
    item = storage.element.itemsize
    if math.prod(shape) == 0:
        return np.empty(shape, storage.element)
    return np.ndarray(shape, storage.element, storage.bytes, offset * item, [stride * item for stride in strides])


def _parameter(data: Array, *rest: Any) -> Array:
    """torch._utils._rebuild_parameter, and the same with a state."""
    return data


def _plain(function: Any, kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """torch._tensor._rebuild_from_type_v2: a tensor that was saved with attributes, without them."""
    return function(*arguments)


# What a name in a file stands for.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    **{("builtins", kind.__name__): kind for kind in (set, dict, list, tuple, int, float, bool, complex)},
    ("builtins", "getattr"): _member,
    ("torch", "Size"): tuple,
    **{("torch", name): Stub for name in ("Tensor", "device")},
    ("torch.nn.parameter", "Parameter"): Stub,
    ("torch.serialization", "_get_layout"): Stub,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _plain,
}
_STORAGES = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "DoubleStorage": "float64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "UntypedStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_ELEMENT = re.compile(r"(q?u?int|bfloat|float|complex|bits)\d+\w*|bool")  # what torch calls its element types


class Refused(pickle.UnpicklingError):
    """A name in the file is not on the list."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, container: Container) -> None:
        super().__init__(io.BytesIO(container.pickle), encoding="utf-8")
        self.container = container

    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and _ELEMENT.fullmatch(name):
            return Stub(name)
        if module.split(".")[0] == "deepspeed" and "." not in name:
            return Stub
        raise Refused(f"{module}.{name}")

    def persistent_load(self, reference: Any) -> _Storage:
        _, kind, key, _, count = reference
        stored = element(kind)
        return _Storage(self.container.storage(key, count * stored.itemsize), stored)


def load(path: Path) -> Any:
    """The object in `path`; its tensors are read-only arrays in the mapped file, read when used. Raises UserError if
    refused."""
    try:
        return _Unpickler(Container(path)).load()
    except Refused as refusal:
        raise UserError(
            Problem(
                str(path),
                str(refusal),
                "the file names code that no checkpoint of DeepSpeed needs; it was not run",
                "do not use this file; get the checkpoint from where it was written",
            )
        ) from None
    except Exception as error:  # a damaged pickle raises whatever it comes upon
        why = (str(error).splitlines() or ["it is damaged"])[0]
        raise UserError(
            Problem(str(path), type(error).__name__, f"it cannot be read: {why}", "use another checkpoint")
        ) from None
