"""Loss over held-out samples, equal for every world size.

Called by the loop on every rank.
Must never let ranks run different numbers of forwards: short shares are padded and weigh nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from recipes.shared.data.samples import Samples
from recipes.shared.losses import Batch, Objective
from recipes.shared.state import TrainState


def evaluate(state: TrainState, validation: Samples, objective: Objective, at_most: int | None = None) -> float | None:
    """Mean loss over the first `eval.samples` samples (all of a smaller split), by weight; None when 0 are asked.

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
            present = np.minimum(indices, count - 1)
            weights = torch.from_numpy(validation.weights(present) * (indices < count)).to(ranks.device)
            losses = objective.sample_losses(state.engine, on_device(validation.batch(present), ranks.device)).double()
            total += torch.stack([(losses * weights).sum(), weights.sum()])
    state.engine.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])


def on_device(batch: dict[str, npt.NDArray[np.generic]], device: torch.device) -> Batch:
    """Arrays of `Samples.batch` as tensors on this rank's device."""
    return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in batch.items()}
