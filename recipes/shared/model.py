"""Plan -> model: the Hugging Face architecture of its configuration, with the same initial weights at every stage.

Called by recipes on every rank, after `distributed.initialise`.
Must never download anything, and never hold a whole model per rank at stage 3.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from launcher.plan import Plan
from recipes.shared import architecture
from recipes.shared.adapter_export import PREFIX, base_name
from recipes.shared.construct import ShardedConstruction
from recipes.shared.distributed import Ranks
from recipes.shared.hf_config import DTYPES
from recipes.shared.lora import adapted
from recipes.shared.pretrained import load_whole, match, open_weights


def build_model(plan: Plan, ranks: Ranks) -> nn.Module:
    """The model in training mode. Weights equal those of a plain construction after `torch.manual_seed(run.seed)`, or
    those of `model.init_from`; a run that goes on gets its own from the checkpoint later. With peft=lora an adapter is
    added, which changes nothing yet.

    All ranks. Stages 0 to 2: whole, fp32, on the CPU (the engine casts and moves it). Stage 3: partitioned.
    """
    given = plan.config.model.init_from if plan.resume_from is None else None
    seed_everything(plan.config.run.seed)
    if plan.zero_stage == 3 and ranks.world_size > 1:
        model = _partitioned(plan, ranks, Path(given) if given else None)
    elif given is None:
        model = adapted(plan, from_config(plan))
    else:
        model = _undrawn(plan)
        load_whole(model, Path(given))
        model = adapted(plan, model)
    seed_everything(plan.config.run.seed + 1 + ranks.rank)  # dropout differs between ranks
    model.train()
    return model


def _partitioned(plan: Plan, ranks: Ranks, given: Path | None) -> nn.Module:
    """The model in shards, one per rank. Of `given` weights rank 0 reads one tensor after the other."""
    dtype = DTYPES[plan.precision]
    if given is None:
        with ShardedConstruction(ranks.device) as construction:
            model = adapted(plan, from_config(plan))
        construction.partition(model, dtype, plan.deepspeed)
        return model
    with ShardedConstruction(ranks.device, drawn=False) as construction:
        base = _undrawn(plan)
        matched = match(base, open_weights(given), given)
        construction.drawn = True  # the adapter, which no folder holds
        model = adapted(plan, base)

    def read(name: str) -> torch.Tensor | None:
        known = base_name(name)
        return None if known is None else matched[known].read()

    construction.partition(model, dtype, plan.deepspeed, read)
    for name, buffer in base.named_buffers():
        known = base_name(f"{PREFIX}{name}")
        if known in matched:
            buffer.data.copy_(matched[known].read())
    return model


def _undrawn(plan: Plan) -> Any:
    """The model without the work of drawing values that are read anyway."""
    if plan.config.model.target is not None:
        return from_config(plan)
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model: Any = from_config(plan)
        model.tie_weights()  # which the library leaves out with the rest
    return model


def from_config(plan: Plan) -> nn.Module:
    """A model drawn from its configuration in fp32: a language model, or a module of the user's own."""
    return architecture.drawn(plan.config)


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch (CPU and accelerator) of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
