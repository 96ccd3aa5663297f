"""A safetensors file on the disk -> which of its tensors differ from those that were to be written.

Used by export. The library that readers use says what the file holds, and refuses one with gaps in it.
Must never believe a tensor because it was written: every byte is read again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash
from safetensors import safe_open

from recipes.shared.elements import SAFETENSORS
from recipes.shared.safetensors_writer import Shard

CHUNK_BYTES = 2**20  # read and summed while it lies in a core's cache
LENGTH_BYTES = 8  # of the number before the header


def differing(
    shard: Shard, folder: Path, digests: dict[str, str], threads: int, read: Callable[[int], None]
) -> set[str]:
    """Names of tensors whose name, type, shape or bytes (by their checksums in `digests`) are not those of `shard`.

    `read` is told the bytes of each tensor that has been read.
    """
    path = folder / shard.file
    file: Any = safe_open(path, "np")
    stored = {name: file.get_slice(name) for name in file.offset_keys()}
    sizes = {item.name: item.nbytes for item in shard.items}
    wanted = {item.name: (SAFETENSORS[item.dtype.name], item.shape) for item in shard.items}
    found = {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in stored.items()}
    odd = {name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)}
    if odd:
        return odd
    handle = os.open(path, os.O_RDONLY)
    try:
        start = LENGTH_BYTES + int.from_bytes(os.pread(handle, LENGTH_BYTES, 0), "little")
        with ThreadPoolExecutor(threads) as pool:
            waiting = {}
            for name in stored:  # they lie end to end, in this order
                waiting[name] = pool.submit(_checksum, handle, start, sizes[name], read)
                start += sizes[name]
            return {name for name, result in waiting.items() if result.result() != digests[name]}
    finally:
        os.close(handle)


def _checksum(handle: int, start: int, size: int, read: Callable[[int], None]) -> str:
    """That of `size` bytes from `start` on, as `write_shard` returns it; of fewer where the file ends."""
    state, buffer, done = xxhash.xxh3_128(), memoryview(bytearray(min(size, CHUNK_BYTES))), 0
    while done < size and (count := os.preadv(handle, [buffer[: size - done]], start + done)):
        state.update(buffer[:count])
        done += count
    read(size)
    return state.hexdigest()
