"""Reads DeepSpeed's .pt files without running what they may contain: mapped tensors, plain values, inert stubs.

Used by export (and anything else that reads checkpoints without an engine).
Must never import or call a name that is not on the list: such a file is refused.
"""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any

import torch

from launcher.errors import Problem, UserError

_ALLOWED = {
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "set"),
    ("builtins", "dict"),
    ("builtins", "list"),
    ("builtins", "tuple"),
    ("builtins", "int"),
    ("builtins", "float"),
    ("builtins", "bool"),
    ("builtins", "complex"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.serialization", "_get_layout"),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
}


class Stub:
    """Stands in for an object of DeepSpeed's own classes; holds nothing that runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _member(owner: Any, name: str) -> Stub:
    """`getattr(an enum, the name of a member)`, as Python 3.11.2 and its like write one; nothing is looked up."""
    return Stub(name)


def _rebuild_plain(function: Any, kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """A tensor that was saved with attributes, without them: `function` is a name on the list."""
    return function(*arguments)


class Refused(pickle.UnpicklingError):
    """A name in the file is not on the list."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _rebuild_plain
        module = "builtins" if module == "__builtin__" else module
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and (name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module.split(".")[0] == "deepspeed" and "." not in name:
            return Stub
        raise Refused(f"{module}.{name}")


class _Module:
    """What torch.load wants as a pickle module."""

    __name__ = "recipes.shared.checkpoint.unpickle"
    Unpickler = _Unpickler
    UnpicklingError = pickle.UnpicklingError
    OrderedDict = collections.OrderedDict

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return _Unpickler(file, **options).load()


def load(path: Path) -> Any:
    """The object in `path`; its tensors are views of the mapped file, read when used. Raises UserError if refused."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, pickle_module=_Module, weights_only=False)
    except Refused as refusal:
        raise UserError(
            Problem(
                str(path),
                str(refusal),
                "the file names code that no checkpoint of DeepSpeed needs; it was not run",
                "do not use this file; get the checkpoint from where it was written",
            )
        ) from None
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError) as error:
        raise UserError(
            Problem(
                str(path),
                type(error).__name__,
                f"it cannot be read: {str(error).splitlines()[0]}",
                "use another checkpoint",
            )
        ) from None
