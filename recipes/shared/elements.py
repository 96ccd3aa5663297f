"""Element types of tensors as NumPy's, by the names that torch, plans and safetensors give them; between two of them.

Used by what reads checkpoints and writes exports, and must not pay for torch; ml_dtypes gives NumPy bf16.
Must never round otherwise than torch does: an export equals `tensor.to(dtype)` bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]
Element = np.dtype[Any]

BFLOAT16 = ml_dtypes.bfloat16
NAMES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": BFLOAT16,
    "float64": np.float64,
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.bool_,
    "complex64": np.complex64,
    "complex128": np.complex128,
}
"""What torch calls a type, and NumPy too."""
OF_PLANS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SAFETENSORS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""By the same name, what a file's header calls it."""
FP16_MAX = 65504.0


def element(name: str) -> Element:
    """The type of a name of torch's."""
    return np.dtype(NAMES[name])


def is_floating(kind: Element) -> bool:
    """Whether it is a floating-point type; NumPy itself does not count bf16 among them."""
    return kind.kind == "f" or kind == BFLOAT16


def cast(array: Array, wanted: Element) -> Array:
    """`array` in another element type, rounded to nearest even, as torch does: by way of fp32. Itself where it is."""
    if array.dtype == wanted:
        return array
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are meant
        if is_floating(array.dtype) and wanted in (BFLOAT16, np.float16):
            array = array.astype(np.float32, copy=False)
        return array.astype(wanted)


def as_torch(array: Array) -> torch.Tensor:
    """The same memory as a tensor."""
    import torch

    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
