"""Named tensors -> sharded safetensors files and their index, written in parallel, from parts of tensors.

Used by export. The format: 8 bytes of header length, a JSON header, then the tensors' bytes end to end.
Must never hold more of a tensor in memory than one part of it a thread.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from recipes.shared.elements import SAFETENSORS, Array, Element, cast

INDEX = "model.safetensors.index.json"
SYNC_EVERY_S = 0.05  # while a file is written; if only at its end, disk and cores wait for each other


@dataclass(frozen=True)
class Item:
    """A tensor to write: its name, shape, element type in the file, and its elements in order, in flat parts."""

    name: str
    shape: tuple[int, ...]
    dtype: Element
    parts: Callable[[], Iterator[Array]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One file: its name and what lies in it, in order."""

    file: str
    items: tuple[Item, ...]


def layout(items: list[Item], max_shard_bytes: int) -> list[Shard]:
    """Consecutive items per file, each up to `max_shard_bytes`; a larger tensor goes alone."""
    groups: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if groups[-1] and size + item.nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.nbytes
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else ["model.safetensors"]
    return [Shard(name, tuple(group)) for name, group in zip(names, groups, strict=True)]


def write_index(shards: list[Shard], folder: Path) -> None:
    """The index of several files; a single one needs none."""
    if len(shards) == 1:
        return
    index = {
        "metadata": {"total_size": sum(item.nbytes for shard in shards for item in shard.items)},
        "weight_map": {item.name: shard.file for shard in shards for item in shard.items},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_shard(
    shard: Shard, folder: Path, threads: int, written: Callable[[int], None], turn: threading.Lock
) -> dict[str, str]:
    """Writes one file, syncs it, and gives it its name; returns the checksum of each tensor's bytes.

    `written` is told the bytes of each part that is done. Of several files that are written at once, the one that has
    `turn` is copied, by all of its threads; the others wait for the disk.
    """
    header, starts = _header(shard)
    path = folder / f"{shard.file}.part"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        with _reaching_the_disk(handle), turn, ThreadPoolExecutor(threads) as pool:
            os.pwrite(handle, header, 0)
            largest_first = sorted(shard.items, key=lambda item: -item.nbytes)
            waiting = {
                item.name: pool.submit(_write_item, item, handle, starts[item.name], written) for item in largest_first
            }
            digests = {item.name: waiting[item.name].result() for item in shard.items}
    finally:
        os.close(handle)
    os.replace(path, folder / shard.file)
    return digests


@contextmanager
def _reaching_the_disk(handle: int) -> Iterator[None]:
    """What the body writes goes to the disk meanwhile, and is there when this is left; raises OSError where it cannot.

    The kernel tells of a failed write once: whoever syncs first must not lose it.
    """
    over = threading.Event()

    def sync() -> None:
        while not over.wait(SYNC_EVERY_S):
            os.fdatasync(handle)

    with ThreadPoolExecutor(1) as pool:
        syncing = pool.submit(sync)
        try:
            yield
        finally:
            over.set()
        syncing.result()
    os.fsync(handle)


def _header(shard: Shard) -> tuple[bytes, dict[str, int]]:
    """The bytes before the tensors, and where in the file each tensor begins."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, offset = {}, 0
    for item in shard.items:
        entries[item.name] = {
            "dtype": SAFETENSORS[item.dtype.name],
            "shape": list(item.shape),
            "data_offsets": [offset, offset + item.nbytes],
        }
        starts[item.name] = offset
        offset += item.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def _write_item(item: Item, handle: int, start: int, written: Callable[[int], None]) -> str:
    state, end = xxhash.xxh3_128(), start + item.nbytes
    for part in item.parts():
        data = _bytes(cast(part, item.dtype))
        state.update(data)
        done = 0
        while done < len(data):
            done += os.pwrite(handle, data[done:], start + done)
        start += len(data)
        written(len(data))
    assert start == end, f"{item.name}: {end - start} bytes are missing"
    return state.hexdigest()


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
