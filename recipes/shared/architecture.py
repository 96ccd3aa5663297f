"""Configuration -> the module it describes, drawn in fp32: a language model, or one of the user's own.

Used where models are built, on ranks and in profiles.
Must never load DeepSpeed: a profile needs none of it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from launcher.errors import Problem, UserError
from launcher.schema import RunConfig
from recipes.shared.hf_config import make_config, model_class
from recipes.shared.own_code import make_model


def drawn(config: RunConfig) -> nn.Module:
    """A model drawn from its configuration in fp32, with or without activation checkpointing."""
    section = config.model
    if section.target is not None:
        return _checkpointing(config, make_model(section.target, config.run.source, section.config))
    options: dict[str, Any] = {"dtype": torch.float32}
    if section.attn_implementation:
        options["attn_implementation"] = section.attn_implementation
    fields = make_config(section.config)
    fields.use_cache = False
    model: nn.Module = model_class(fields).from_config(fields, **options)
    return _checkpointing(config, model)


def _checkpointing(config: RunConfig, model: Any) -> nn.Module:
    if config.activation.checkpointing:
        if not hasattr(model, "gradient_checkpointing_enable"):
            why = "the module has no method gradient_checkpointing_enable"
            raise UserError(Problem("activation", "full", why, "use activation=none, or give it one"))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return cast(nn.Module, model)
