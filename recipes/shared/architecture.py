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
    """transformers 5 renamed the method within its life; a module of the user's own may have either name."""
    if config.activation.checkpointing:
        options = {"use_reentrant": False}
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        elif hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        else:
            why = "the module has no method gradient_checkpointing_enable"
            raise UserError(Problem("activation", "full", why, "use activation=none, or give it one"))
    return cast(nn.Module, model)
