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

BFLOAT16: Element = np.dtype(ml_dtypes.bfloat16)
OF_TORCH: dict[str, Element] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "float64": np.dtype(np.float64),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
    "complex64": np.dtype(np.complex64),
    "complex128": np.dtype(np.complex128),
}
OF_PLANS = {"fp32": OF_TORCH["float32"], "bf16": BFLOAT16, "fp16": OF_TORCH["float16"]}
SAFETENSORS = {
    OF_TORCH["float32"]: "F32",
    OF_TORCH["float16"]: "F16",
    BFLOAT16: "BF16",
    OF_TORCH["float64"]: "F64",
    OF_TORCH["int64"]: "I64",
    OF_TORCH["int32"]: "I32",
    OF_TORCH["int16"]: "I16",
    OF_TORCH["int8"]: "I8",
    OF_TORCH["uint8"]: "U8",
    OF_TORCH["bool"]: "BOOL",
}
"""Name in a file's header, by element type."""
FP16 = OF_TORCH["float16"]
FP16_MAX = float(np.finfo(np.float16).max)


def is_floating(element: Element) -> bool:
    """Whether it is a floating-point type; NumPy itself does not count bf16 among them."""
    return element.kind == "f" or element == BFLOAT16


def cast(array: Array, element: Element) -> Array:
    """`array` in another element type, rounded to nearest even, as torch does: by way of fp32. Itself where it is."""
    if array.dtype == element:
        return array
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are meant
        if is_floating(array.dtype) and element in (BFLOAT16, FP16):
            array = array.astype(np.float32, copy=False)
        return array.astype(element)


def as_torch(array: Array) -> torch.Tensor:
    """The same memory as a tensor."""
    import torch

    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
