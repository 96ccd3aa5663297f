"""How a batch becomes a loss: objectives that recipes hand to the shared loop.

Each takes the engine and a batch and returns a scalar to differentiate, or per-sample losses to average.
Must never reduce over ranks: the loop does.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn import functional

Batch = dict[str, torch.Tensor]
NO_LABEL = -100  # of tokens that are not to be predicted


class Objective(Protocol):
    """What is minimised. Every rank calls the same method at the same time: both run the model's forward once."""

    def loss(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Mean over the batch, each sample by its weight; scalar."""

    def sample_losses(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Mean of each sample alone; fp32 [n]."""


class CausalLM:
    """Next-token cross-entropy in nats over the tokens that have a label: `input_ids` and `labels`, [n, length]."""

    def loss(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Mean over all labels of the batch; scalar."""
        loss: torch.Tensor = engine(**batch).loss
        return loss

    def sample_losses(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Mean over the labels of each sample; fp32 [n]."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return _means(engine(**inputs).logits[:, :-1], batch["labels"][:, 1:])


class Seq2Seq:
    """Cross-entropy in nats of what an encoder-decoder writes: `input_ids` [n, read] and `labels` [n, written].

    Labels are not shifted: the model makes the decoder's inputs of them, by its own start token.
    """

    def loss(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Mean over all labels of the batch; scalar."""
        loss: torch.Tensor = engine(**batch).loss
        return loss

    def sample_losses(self, engine: Any, batch: Batch) -> torch.Tensor:
        """Mean over the labels of each sample; fp32 [n]."""
        return _means(engine(**batch).logits, batch["labels"])


def _means(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the labels of each sample; logits [n, length, vocabulary], labels [n, length]."""
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="none"
    )
    return losses.view(labels.shape).sum(dim=1) / (labels != NO_LABEL).sum(dim=1)
