"""Named tensors -> sharded safetensors files and their index, written one tensor at a time.

Used by export. The format: 8 bytes of header length, a JSON header, then the tensors' bytes end to end.
Must never hold more than one tensor in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Item:
    """A tensor to write: its name, shape, element type, and a function that reads it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(items: list[Item], folder: Path, max_shard_bytes: int, written: Callable[[int], None]) -> list[str]:
    """Writes model*.safetensors (and the index when there are several) into `folder`; returns the file names.

    `written` is told the bytes of each tensor that is done.
    """
    shards = _split(items, max_shard_bytes)
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    )
    for name, shard in zip(names, shards, strict=True):
        _write_shard(shard, folder / name, written)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(item.nbytes for item in items)},
            "weight_map": {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return names


def _split(items: list[Item], limit: int) -> list[list[Item]]:
    """Consecutive items per shard, each up to `limit` bytes; a larger tensor goes alone."""
    shards: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    return shards


def _write_shard(items: list[Item], path: Path, written: Callable[[int], None]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for item in items:
        header[item.name] = {
            "dtype": _NAMES[item.dtype],
            "shape": list(item.shape),
            "data_offsets": [offset, offset + item.nbytes],
        }
        offset += item.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for item in items:
            tensor = item.read().to(item.dtype).contiguous()
            file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
            written(item.nbytes)
        file.flush()
        os.fsync(file.fileno())
