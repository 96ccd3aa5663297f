"""Makes samples from a token file: non-overlapping windows of sequence_length tokens, read through a memory map.

Called by `corpus.open_corpus`, and through it by the train loop and the evaluation.
Must never load the file into memory, and never decide the order of samples (that is `order`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt


class TokenWindows:
    """Memory-mapped token file cut into non-overlapping windows (labels = inputs: the model does the shift).

    Tokens after the last full window are left out.
    """

    def __init__(
        self,
        path: Path,
        sequence_length: int,
        *,
        dtype: str = "uint16",
        start: int = 0,
        num_tokens: int | None = None,
    ) -> None:
        """Maps tokens start .. start + num_tokens - 1 of `path` (None: to the end of the file).

        Args: sequence_length in tokens, >= 1; dtype "uint16" or "uint32", little-endian, without a header.
        Raises: FileNotFoundError; ValueError when the file is shorter than start + num_tokens.
        """
        assert sequence_length >= 1 and start >= 0
        item = np.dtype(dtype).newbyteorder("<")
        if num_tokens is None:
            num_tokens = path.stat().st_size // item.itemsize - start
        self.sequence_length = sequence_length
        self._num_windows = max(0, num_tokens // sequence_length)
        shape = (self._num_windows, sequence_length)
        self._windows: npt.NDArray[np.unsignedinteger] = (
            np.memmap(path, dtype=item, mode="r", offset=start * item.itemsize, shape=shape)
            if self._num_windows
            else np.empty(shape, dtype=item)  # an empty range cannot be mapped
        )

    def __len__(self) -> int:
        """Number of whole windows."""
        return self._num_windows

    def batch(self, indices: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.generic]]:
        """`input_ids` and `labels` of the windows `indices`, each int64 [n, sequence_length]."""
        tokens = self.tokens(indices)
        return {"input_ids": tokens, "labels": tokens}

    def weights(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Tokens that are predicted in each window: one less than it has; float64 [n]."""
        return np.full(len(indices), max(1, self.sequence_length - 1), dtype=np.float64)

    def tokens(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of the windows `indices` (int64 [n], each in [0, len)): int64 [n, sequence_length]."""
        # numpy would wrap a negative index round to the end of the corpus without a word
        assert indices.size == 0 or (indices.min() >= 0 and indices.max() < self._num_windows), "window out of range"
        return self._windows[indices].astype(np.int64)


class Halves:
    """Token windows for an encoder-decoder: it reads the first half of each, and writes the second.

    This is prefix language modelling. Of an odd length the first half is the shorter one.
    """

    def __init__(self, windows: TokenWindows) -> None:
        self.windows = windows
        self.read = windows.sequence_length // 2

    def __len__(self) -> int:
        """Number of whole windows."""
        return len(self.windows)

    def batch(self, indices: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.generic]]:
        """`input_ids` and `labels` of the windows `indices`, int64 [n, read] and [n, the rest]."""
        tokens = self.windows.tokens(indices)
        return {"input_ids": tokens[:, : self.read], "labels": np.ascontiguousarray(tokens[:, self.read :])}

    def weights(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Tokens that are written of each window; float64 [n]."""
        return np.full(len(indices), self.windows.sequence_length - self.read, dtype=np.float64)
