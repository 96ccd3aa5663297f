"""Models and data as users bring them: what each of them is hard about is said beside it.

Named by targets in tests/train/test_own_code.py and test_parity_families.py; imported by ranks.
Must never be easier than what is found in public code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

WIDTH = 8


class Vectors:
    """Rows of random numbers with their kind, from 0 to 2, and a number to be found."""

    def __init__(self, rows: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.vectors = draw.normal(size=(rows, WIDTH)).astype(np.float32)
        self.kinds = np.arange(rows) % 3
        self.target = (self.vectors[:, 0] * (self.kinds + 1)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.target)

    def batch(self, indices: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        return {
            "vectors": self.vectors[indices],
            "kinds": self.kinds[indices],
            "target": self.target[indices],
        }


def vectors(rows: int = 48) -> tuple[Vectors, Vectors]:
    """Training and validation rows."""
    return Vectors(rows, 0), Vectors(12, 1)


class Experts(nn.Module):
    """Each row is for one expert alone, and with a row a rank most experts are idle there."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        """[n, WIDTH] and [n] -> [n, WIDTH]."""
        found = torch.zeros_like(hidden)
        for kind in kinds.unique().tolist():
            mine = kinds == kind
            found = found.index_put((mine,), self.experts[kind](hidden[mine]))
        return found


class IdleExperts(nn.Module):
    """deepspeedai/DeepSpeed#7998: ranks that use different experts."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mixture = nn.Linear(WIDTH, WIDTH), Experts()
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, vectors: torch.Tensor, kinds: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean squared error."""
        hidden = torch.tanh(self.enter(vectors))
        hidden = hidden + self.mixture(hidden, kinds)
        return ((self.leave(hidden).squeeze(-1) - target) ** 2).mean()


class NumberAndSign(nn.Module):
    """Two objectives over one body, returned by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.number, self.sign = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, vectors: torch.Tensor, kinds: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        """Mean squared error of the number, cross-entropy of its sign."""
        hidden = torch.tanh(self.body(vectors))
        error = (self.number(hidden).squeeze(-1) - target) ** 2
        logits = self.sign(hidden).squeeze(-1)
        sign = nn.functional.binary_cross_entropy_with_logits(logits, (target > 0).to(logits.dtype))
        return {"losses": {"number": error.mean(), "sign": sign}}


class UsedOutside(nn.Module):
    """deepspeedai/DeepSpeed#930: a parent reads a row, and the norm, of parameters of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(3, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, vectors: torch.Tensor, kinds: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """Mean squared error and a penalty."""
        hidden = torch.tanh(vectors + self.table.weight[0] + nn.functional.embedding(kinds, self.table.weight))
        loss = ((self.head(hidden).squeeze(-1) - target) ** 2).mean()
        return {"loss": loss + 0.01 * self.head.weight.norm()}


class LooksAtValues(UsedOutside):
    """Its constructor asks for a value, which torch's meta device does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.start = float(self.head.weight.sum().item())


class Large(nn.Module):
    """24 matrices, 403 MB in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(24))


def stream(rows: int = 8) -> tuple[Any, Any]:
    """Samples that can only be iterated over."""
    return iter(range(rows)), iter(range(rows))


class NoLoss(nn.Module):
    """Its forward gives a prediction, and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, vectors: torch.Tensor, kinds: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """[n, 1]."""
        found: torch.Tensor = self.head(vectors)
        return found


def recipe(plan: Any, run_dir: Any) -> None:
    """A recipe that leaves a word."""
    (run_dir.path / "word").write_text(plan.config.recipe.target)


class Choice(nn.Module):
    """One of two heads, by the rows it gets; nothing of its name or its children's tells that."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, hidden: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        """[n, WIDTH] and [n] -> [n]."""
        found: torch.Tensor = (self.odd if int(kinds[0]) % 2 else self.even)(hidden)
        return found.squeeze(-1)


class TwoHeads(nn.Module):
    """deepspeedai/DeepSpeed#7998: a head that one rank calls, and another does not."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.choice = nn.Linear(WIDTH, WIDTH), Choice()

    def forward(self, vectors: torch.Tensor, kinds: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean squared error."""
        return ((self.choice(torch.tanh(self.enter(vectors)), kinds) - target) ** 2).mean()
