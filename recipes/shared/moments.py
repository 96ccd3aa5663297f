"""The most memory that each moment of a step takes on this rank's GPU, and what the process takes beside torch's own.

Used by `recipes.profile`. On a CPU torch's allocator has no counters that could be read beside a run: there is the
process's resident set alone. Must never change what an engine does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from recipes.shared.metrics import peak_bytes

# A process that has only begun takes less of a GPU than this; what is more is another's, and cannot be told apart.
ALONE_BYTES = 2_000_000_000


class Moments:
    """Peaks by the planner's names of moments: init, forward, backward, step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: dict[str, int] = {}
        self.alone = self._on_cuda and self._beside() < ALONE_BYTES

    @property
    def _on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """What is allocated in it counts for `name`."""
        if not self._on_cuda:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        torch.cuda.synchronize(self.device)
        self.peaks[name] = max(self.peaks.get(name, 0), int(torch.cuda.max_memory_allocated(self.device)))

    def watch(self, engine: Any) -> None:
        """From now on the engine's forward, backward and step are moments."""
        for moment, method in (("forward", "forward"), ("backward", "backward"), ("step", "step")):
            setattr(engine, method, self._within(moment, getattr(engine, method)))

    def highest(self) -> dict[str, int]:
        """{"allocated_bytes", "reserved_bytes"} of all moments; nothing on a CPU."""
        if not self._on_cuda:
            return {}
        reserved = int(torch.cuda.memory_reserved(self.device))  # it is given back at no moment of a step
        return {"allocated_bytes": max(self.peaks.values()), "reserved_bytes": reserved}

    def found(self) -> dict[str, Any]:
        """{"host_bytes"}, and of a GPU {"moments": bytes by moment, "context_bytes" or None, and `highest`}."""
        host = {"host_bytes": peak_bytes(torch.device("cpu"))}
        if not self._on_cuda:
            return host
        return host | self.highest() | {"moments": self.peaks, "context_bytes": self._beside() if self.alone else None}

    def _within(self, moment: str, work: Any) -> Any:
        @functools.wraps(work)
        def measured(*arguments: Any, **options: Any) -> Any:
            with self.at(moment):
                return work(*arguments, **options)

        return measured

    def _beside(self) -> int:
        """Bytes of the GPU that are in use and not torch's."""
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free - torch.cuda.memory_reserved(self.device))
