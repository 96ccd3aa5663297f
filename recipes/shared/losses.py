"""Loss functions that recipes hand to the shared loop.

Each takes the engine and a batch and returns a scalar to differentiate, or per-sample losses to average.
Must never reduce over ranks: the loop does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def causal_lm_loss(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy in nats over `tokens` [batch, length]; scalar."""
    loss: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
    return loss


def causal_lm_sample_losses(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy in nats of each sample of `tokens` [batch, length]; fp32 [batch]."""
    logits = engine(input_ids=tokens).logits[:, :-1].float()
    losses = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(tokens.shape[0], -1).mean(dim=1)
