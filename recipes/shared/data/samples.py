"""What the train loop and the evaluation read: samples by number, as arrays, and what each counts in a mean.

Implemented by token windows and by every other data set, of ours or of a user's own package.
Must never decide the order of samples (that is `order`), or know ranks and batches.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


class Samples(Protocol):
    """A data set whose samples are all there before training and are found by their number. The same on every rank."""

    def __len__(self) -> int:
        """Number of samples."""

    def batch(self, indices: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.generic]]:
        """The samples `indices` (int64 [n], each in [0, len)) as keyword arguments of the model, arrays [n, ...]."""

    def weights(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """What each sample counts in a mean loss, float64 [n], above 0: for a language model its number of labels."""


@runtime_checkable
class Grouped(Samples, Protocol):
    """One that says which samples of a step are better met in one micro-batch. The step itself stays the same set."""

    def grouped(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The same samples, neighbours alike; a function of the set alone."""
