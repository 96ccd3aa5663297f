"""A model of tables and its data: categories and numbers of a row -> one number. An example of code of your own.

Run with model=custom model.target=tabular.Tabular data=custom data.target=tabular.splits run.source=examples/tabular.
Must never need more than torch and NumPy: it shows all that a model and its samples have to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

SIZES = (7, 5, 11)  # how many categories each column of categories has
NUMBERS = 4  # columns of numbers


class Rows:
    """Rows by number: what `recipes.shared.data.samples` asks for. Without `weights` all rows count the same."""

    def __init__(self, rows: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.categories = np.stack([draw.integers(0, size, rows) for size in SIZES], axis=1)
        self.numbers = draw.normal(3.0, 2.0, (rows, NUMBERS)).astype(np.float32)
        self.target = np.sin(self.numbers[:, 0]) + self.categories[:, 0] / 7 - self.categories[:, 1] * 0.2
        self.target = self.target.astype(np.float32)

    def __len__(self) -> int:
        return len(self.target)

    def batch(self, indices: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """The rows `indices` as keyword arguments of the model's forward, each [n, ...]."""
        columns = {"categories": self.categories, "numbers": self.numbers, "target": self.target}
        return {name: column[indices] for name, column in columns.items()}


def splits(rows: int = 4096, seed: int = 0) -> tuple[Rows, Rows]:
    """Training and validation rows; every rank gets the same, and is given its share of them by number."""
    return Rows(rows, seed), Rows(rows // 8, seed + 1)


class Block(nn.Module):
    """A residual layer with a gain for each unit."""

    def __init__(self, width: int, gain: nn.Parameter) -> None:
        super().__init__()
        self.gain = gain
        self.layer = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, width]."""
        return hidden + self.gain * torch.relu(self.layer(hidden))


class Tabular(nn.Module):
    """One table of embeddings for all columns of categories, numbers brought to mean 0 and deviation 1, two blocks."""

    def __init__(self, width: int = 32, sizes: Sequence[int] = SIZES, rows: int = 4096, seed: int = 0) -> None:
        super().__init__()
        numbers = Rows(rows, seed).numbers
        self.register_buffer("offsets", torch.tensor([0, *np.cumsum(sizes)[:-1]]))
        self.register_buffer("mean", torch.tensor(numbers.mean(axis=0)))
        self.register_buffer("deviation", torch.tensor(numbers.std(axis=0)))
        self.embedding = nn.Embedding(sum(sizes), width)
        self.enter = nn.Linear(numbers.shape[1], width)
        gain = nn.Parameter(torch.full((width,), 0.5))
        self.first, self.second = Block(width, gain), Block(width, gain)  # one parameter, used by two modules
        self.leave = nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """Mean squared error over the rows, as `loss`; categories int64 [n, columns], numbers and target fp32."""
        return {"loss": self.sample_losses(categories, numbers, target).mean()}

    def sample_losses(self, categories: torch.Tensor, numbers: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Squared error of each row, fp32 [n]: evaluation then takes whole batches."""
        standard = (numbers - self.mean) / self.deviation
        hidden = self.embedding(categories + self.offsets).sum(dim=1)
        hidden = hidden + self.enter(standard.to(hidden.dtype))
        found = self.scale * self.leave(self.second(self.first(hidden))).squeeze(-1)
        return (found.float() - target) ** 2
