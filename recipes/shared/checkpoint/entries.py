"""Tensors of a checkpoint as they lie in its shards: flat pieces, in order, read part by part.

Made by `layouts`; used by everything that reads checkpoints.
Must never return a tensor with a piece missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from recipes.shared.elements import Array, Element, as_torch

if TYPE_CHECKING:
    import torch

TRAINED, FROZEN, BUFFER = "trained", "frozen", "buffer"


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of the flat array `flat`."""

    flat: Array
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """One stored tensor: where its elements lie, in order, and what it is."""

    name: str
    shape: tuple[int, ...]
    dtype: Element
    pieces: tuple[Piece, ...]
    kind: str
    """trained: from fp32 masters; frozen or buffer: as the model has it."""

    @property
    def trainable(self) -> bool:
        """Whether the optimizer has it."""
        return self.kind == TRAINED

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def read(self) -> torch.Tensor:
        """The whole tensor, freshly allocated, in its stored element type."""
        whole = np.empty(self.numel, self.dtype)
        self.read_into(whole, 0)
        return as_torch(whole.reshape(self.shape))

    def parts(self, at_most: int) -> Iterator[Array]:
        """The elements in order, in flat views of the mapped shards of up to `at_most` elements each."""
        left = self.numel
        for piece in self.pieces:
            stop = min(piece.stop, piece.start + left)
            for start in range(piece.start, stop, at_most):
                yield piece.flat[start : min(start + at_most, stop)]
            left -= stop - piece.start
        assert left == 0, f"{self.name}: {left} of {self.numel} elements are missing"

    def read_into(self, target: Array, start: int) -> None:
        """Fills flat `target` with the elements from `start` on; what lies beyond the tensor's end is left alone.

        Only the pages of the shards that hold those elements are read.
        """
        stop = min(start + target.size, self.numel)
        offset = 0
        for piece in self.pieces:
            end = min(offset + piece.stop - piece.start, self.numel)
            low, high = max(offset, start), min(end, stop)
            if low < high:
                source = piece.flat[piece.start + low - offset : piece.start + high - offset]
                np.copyto(target[low - start : high - start], source, casting="unsafe")
            offset = end
        assert offset == self.numel, f"{self.name}: {offset} of {self.numel} elements"


@dataclass(frozen=True)
class Checkpoint:
    """Every tensor once, in the model's order, and the names that are tied to another."""

    entries: tuple[Entry, ...]
    tied: dict[str, str]
    stage: int

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)
