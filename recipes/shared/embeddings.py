"""A Hugging Face model -> the same model for another number of tokens, before an engine is built of it.

Called on every rank, at any stage.
Must never let ranks hold different rows, or leave the output layer and the configuration at the old size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launcher.errors import Problem, UserError
from recipes.shared import gather, masters

DEFAULT_SPREAD = 0.02  # of new rows, where the configuration has no initializer_range


def resize_embeddings(model: Any, num_tokens: int, seed: int) -> None:
    """Cuts or extends the rows of input embeddings and output layer to `num_tokens`, ties kept. All ranks.

    New rows are drawn from `seed`, the same on every rank and at every stage; new biases are 0. Two layers of rows are
    whole at a time at most. Raises UserError on a built engine, which would not learn of it.
    """
    _refuse(model, num_tokens)
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    generator = torch.Generator().manual_seed(seed)
    spread = float(getattr(model.config.get_text_config(), "initializer_range", DEFAULT_SPREAD))
    tied = outputs is not None and outputs.weight is inputs.weight
    inputs.weight = _resized(inputs.weight, num_tokens, generator, spread)
    inputs.num_embeddings = num_tokens
    if outputs is not None:
        outputs.weight = inputs.weight if tied else _resized(outputs.weight, num_tokens, generator, spread)
        outputs.out_features = num_tokens
        if getattr(outputs, "bias", None) is not None:
            outputs.bias = _resized(outputs.bias, num_tokens, generator, 0.0)
    for config in (model.config, model.config.get_text_config()):
        config.vocab_size = num_tokens
    if hasattr(model, "vocab_size"):
        model.vocab_size = num_tokens


def _refuse(model: Any, num_tokens: int) -> None:
    where, padding = "num_tokens", getattr(model.get_input_embeddings(), "padding_idx", None)
    if masters.is_built(next(model.parameters())):
        why = "an engine has been built: its optimizer knows the old rows alone"
        raise UserError(Problem("resize_embeddings", "a built engine", why, "resize the model before build_engine"))
    if num_tokens < 1:
        raise UserError(Problem(where, str(num_tokens), "a model needs a token", "give at least 1"))
    if padding is not None and padding >= num_tokens:
        why = f"token {padding} is the padding, and its row would be cut off"
        raise UserError(Problem(where, str(num_tokens), why, f"keep at least {padding + 1}"))


def _resized(old: nn.Parameter, rows: int, generator: torch.Generator, spread: float) -> nn.Parameter:
    """A parameter of `rows` rows that begins like `old`, lies where that lies and is partitioned like it."""
    shape = gather.shape(old)
    with gather.read(old):
        whole = torch.empty((rows, *shape[1:]), dtype=old.dtype, device=old.device)
        kept = min(rows, shape[0])
        whole[:kept] = old.detach()[:kept]
    fresh = torch.empty((rows - kept, *shape[1:]), dtype=torch.float32).normal_(0.0, spread or 1.0, generator=generator)
    whole[kept:] = fresh.to(old.dtype) if spread else 0.0
    new = nn.Parameter(whole, requires_grad=old.requires_grad)
    if hasattr(old, "ds_id"):
        old.convert_to_zero_parameters(param_list=[new])
    return new
