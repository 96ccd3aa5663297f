"""Whether a model can be trained on conversations, and keeps those apart that lie in one row: asked of it beforehand.

Called by recipes on every rank, where samples are packed.
Must never trust the name of a model or of an attention kernel: one that ignores positions mixes them without a word.
"""

from __future__ import annotations

import numpy as np
import torch

from launcher.errors import Problem, UserError
from launcher.plan import Plan
from recipes.shared.data.layouts import Packed, Padded
from recipes.shared.hf_config import is_encoder_decoder
from recipes.shared.state import TrainState

LENGTH = 8  # tokens of each of the two conversations
RELATIVE = 1e-3  # of the largest logit: far below what a mixed-in token does, far above any kernel's noise


def refuse_others(plan: Plan) -> None:
    """Raises UserError for a model that does not continue its input as Hugging Face's causal ones do. Any rank."""
    section = plan.config.model
    if section.target is not None:
        why = "a module of your own says itself what its loss is, and conversations are learned by their responses"
        raise UserError(Problem("model.target", section.target, why, "use recipe=custom, or a Hugging Face model"))
    if is_encoder_decoder(section.config):
        why = "it reads its input with an encoder; a conversation is one text, in which the responses are learned"
        raise UserError(Problem("model", str(section.config["model_type"]), why, "use a causal language model"))


def refuse_mixed(state: TrainState, training: Packed | Padded) -> None:
    """Raises UserError when a token's logits change with another conversation of its row. All ranks, two forwards."""
    if not isinstance(training, Packed):
        return
    length = min(LENGTH, state.plan.config.train.sequence_length // 2)
    state.engine.eval()
    with torch.no_grad():
        one, other = (_logits(state, length, shift) for shift in (0, length))
    state.engine.train()
    difference = float((one - other).abs().max() / one.abs().max())
    if difference > RELATIVE:
        raise UserError(
            Problem(
                "data.packing",
                f"true, with {type(state.engine.module).__name__}",
                f"another conversation in a row changes this model's logits by {difference:.1%}: it does not tell them "
                "apart by their positions",
                "use data.packing=false",
            )
        )


def _logits(state: TrainState, length: int, shift: int) -> torch.Tensor:
    """Those of the second of two conversations, in a batch as large as in training; `shift` changes the first."""
    vocabulary = int(state.plan.config.model.config.get("vocab_size", 2 * length))
    first, second = (np.arange(length) + shift) % vocabulary, np.arange(length)[::-1] % vocabulary
    rows = state.plan.batch.micro_batch_size
    ids = torch.from_numpy(np.concatenate([first, second])).repeat(rows, 1).to(state.ranks.device)
    positions = torch.arange(length).repeat(2).repeat(rows, 1).to(state.ranks.device)
    logits: torch.Tensor = state.engine(input_ids=ids, position_ids=positions).logits[:, length:].float()
    return logits
