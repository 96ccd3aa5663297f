"""Loss over held-out samples, equal for every world size.

Called by the loop on every rank.
Must never let ranks run different numbers of forwards: short shares are padded and weigh nothing.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from recipes.shared.data.windows import TokenWindows
from recipes.shared.losses import causal_lm_sample_losses
from recipes.shared.state import TrainState


def evaluate(state: TrainState, validation: TokenWindows, at_most: int | None = None) -> float | None:
    """Mean loss in nats/token over the first `eval.samples` windows (all of a smaller split); None when 0 are asked.

    `at_most`: fewer than that. All ranks.
    """
    count = min(state.plan.config.eval.samples, len(validation), len(validation) if at_most is None else at_most)
    if count == 0:
        return None
    ranks, micro = state.ranks, state.plan.batch.micro_batch_size
    share = -(-count // ranks.world_size)
    mine = np.arange(share) * ranks.world_size + ranks.rank
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    state.engine.eval()
    with torch.no_grad():
        for start in range(0, share, micro):
            indices = mine[start : start + micro]
            weights = torch.from_numpy((indices < count).astype(np.float64)).to(ranks.device)
            tokens = torch.from_numpy(validation.batch(np.minimum(indices, count - 1))).to(ranks.device)
            losses = causal_lm_sample_losses(state.engine, tokens).double()
            total += torch.stack([(losses * weights).sum(), weights.sum()])
    state.engine.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])
