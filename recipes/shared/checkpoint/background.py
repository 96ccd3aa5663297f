"""Takes writing a checkpoint off the training step: a snapshot in host memory, and a thread that writes it.

Called by `save` where `checkpoint.background` is on. The commit protocol is the same: every rank's shards under a
temporary name, rank 0's manifest last, then the rename and `latest`.
Must never have more than one snapshot at a time, and never use the process group from the thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from launcher.rundir import read_json, write_json
from recipes.shared.checkpoint import manifest

POLL_S = 0.05


class Buffers:
    """Host memory for snapshots, kept from one to the next: as much as one takes, from the first one on.

    Memory that the process has not touched before makes a copy slow: 0.66 GB took 0.3 to 2.9 s into it, 0.15 s again.
    """

    def __init__(self) -> None:
        self.free: dict[Any, list[torch.Tensor]] = {}
        self.lent: list[tuple[Any, torch.Tensor]] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` that stands until `take_back`."""
        kind = (tensor.dtype, tensor.shape, tensor.stride())
        free = self.free.get(kind)
        buffer = free.pop() if free else torch.empty_like(tensor, device="cpu")
        self.lent.append((kind, buffer))
        return buffer.copy_(tensor)

    def take_back(self) -> None:
        """Every copy handed out may be overwritten."""
        while self.lent:
            kind, buffer = self.lent.pop()
            self.free.setdefault(kind, []).append(buffer)


class Snapshots:
    """Stands in for DeepSpeed's checkpoint engine while a snapshot is taken: keeps what it would have written."""

    def __init__(self, engine: Any, buffers: Buffers) -> None:
        self.real = engine.checkpoint_engine
        self.buffers = buffers
        self.files: list[tuple[Any, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Copies every tensor to host memory; the training that goes on does not change the copy."""
        self.files.append((copied(state_dict, {}, self.buffers), path))

    def write(self) -> None:
        """Writes the snapshot; its memory is free for the next one then."""
        while self.files:
            state_dict, path = self.files.pop(0)
            self.real.save(state_dict, path)
        self.buffers.take_back()


class Writer:
    """This rank's thread, one checkpoint at a time. Errors wait for `finish`, which every rank calls."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.buffers = Buffers()

    def start(self, work: Callable[[], None]) -> None:
        """Runs `work` in the thread; the one before must have been finished."""
        assert self.thread is None, "two snapshots at a time"

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised again in the main thread
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True, name="checkpoint")
        self.thread.start()

    def finish(self) -> bool:
        """Waits for the thread; whether there was one. Raises what it raised."""
        if self.thread is None:
            return False
        self.thread.join()
        self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return True


def copied(value: Any, known: dict[Any, torch.Tensor], buffers: Buffers) -> Any:
    """`value` with every tensor copied to host memory; tensors that share their elements share the copy's."""
    if torch.is_tensor(value):
        place = (value.device, value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
        if not value.numel():
            return value.detach().cpu().clone()
        if place not in known:
            copy = buffers.copy(value.detach())
            known[place] = (
                torch.nn.Parameter(copy, value.requires_grad) if isinstance(value, torch.nn.Parameter) else copy
            )
        return known[place]
    if isinstance(value, dict):
        result = type(value)() if type(value) is not dict else {}
        for key, item in value.items():
            result[key] = copied(item, known, buffers)
        return result
    if isinstance(value, list):
        return [copied(item, known, buffers) for item in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(copied(item, known, buffers) for item in value)
    return value


def write_part(staging: Path, tag: str, rank: int, snapshots: Snapshots) -> None:
    """This rank's files, synced, and the list of them with sizes and checksums, last."""
    paths = [Path(path) for _, path in snapshots.files]
    snapshots.write()
    folder = staging / tag
    own = [*paths, *folder.glob(f"rng_rank{rank:05d}.pt")]
    files = {str(path.relative_to(folder)): manifest.digest(path, sync=True) for path in own}
    write_json(staging / f"part.{rank}.json", files)


def gather_parts(staging: Path, world_size: int) -> dict[str, Any]:
    """Rank 0: every rank's list, once each has written its own. A rank that dies ends the run, and this thread."""
    files: dict[str, Any] = {}
    for rank in range(world_size):
        path = staging / f"part.{rank}.json"
        while (part := read_json(path)) is None:
            time.sleep(POLL_S)
        files |= part
        os.unlink(path)
    return dict(sorted(files.items()))
