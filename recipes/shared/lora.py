"""A model -> the same model, frozen, with a LoRA adapter inside, and what a checkpoint must tell of it.

Used when a model is built and when a checkpoint is saved; `adapter_export` reads such a checkpoint. PEFT does the work.
Must never adapt fewer layers than were asked for, or one whose weights another layer shares.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from launcher.errors import Problem, UserError
from launcher.plan import Plan
from recipes.shared.adapter_export import NAME
from recipes.shared.hf_config import is_encoder_decoder

SEED = 1_000_000_007  # added to run.seed: the adapter's values are those of the seed, however the weights came to be
ALL_LINEAR = ["all-linear"]
LISTED = 5


def adapted(plan: Plan, model: nn.Module) -> nn.Module:
    """The model as the plan wants it trained: itself, or frozen with an adapter of zero effect. Any rank.

    Raises UserError, by name, for layers that are not there or cannot be adapted.
    """
    section = plan.config.peft
    if section.kind == "none":
        return model
    from peft import LoraConfig, get_peft_model

    whole = [name for end in section.modules_to_save for name in _ending(model, end, "peft.modules_to_save")]
    targets: list[str] | str = section.target
    if section.target == ALL_LINEAR:
        targets = ALL_LINEAR[0]
    else:
        layers = [name for end in section.target for name in _ending(model, end, "peft.target")]
        _refuse_others("peft.target", model, layers)
        _refuse_tied("peft.target", model, layers)
    _refuse_tied("peft.modules_to_save", model, whole)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=targets,
        modules_to_save=whole or None,
        task_type=_task(plan),
    )
    torch.manual_seed(plan.config.run.seed + SEED)
    wrapped: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=False)
    wrapped.peft_config[NAME].base_model_name_or_path = plan.config.model.init_from
    if section.target != ALL_LINEAR:
        _refuse_fewer(wrapped, layers)
    return wrapped


def _task(plan: Plan) -> str | None:
    """What PEFT calls what the model does."""
    if plan.config.model.target is not None:
        return None
    return "SEQ_2_SEQ_LM" if is_encoder_decoder(plan.config.model.config) else "CAUSAL_LM"


def _refuse_fewer(wrapped: Any, layers: list[str]) -> None:
    """Raises UserError when PEFT adapted other layers than those that were meant."""
    different = sorted(set(layers) ^ set(wrapped.base_model.targeted_module_names))
    if different:
        why = "PEFT does not adapt exactly the layers that these names mean"
        raise UserError(Problem("peft.target", ", ".join(different[:LISTED]), why, "name the layers one by one"))


def _ending(model: nn.Module, end: str, where: str) -> list[str]:
    """Names of the modules that are called `end`, or end in it after a dot."""
    names = [name for name, _ in model.named_modules()]
    found = [name for name in names if name == end or name.endswith(f".{end}")]
    if not found:
        linear = {name.rpartition(".")[2] for name, module in model.named_modules() if _is_linear(module)}
        why = "no module of this model has such a name"
        raise UserError(Problem(where, end, why, f"its linear layers are called {', '.join(sorted(linear))}"))
    return found


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _refuse_others(where: str, model: nn.Module, names: list[str]) -> None:
    other = [name for name in names if not _is_linear(model.get_submodule(name))]
    if other:
        got, why = ", ".join(other[:LISTED]), "only linear layers are adapted"
        raise UserError(Problem(where, got, why, "name linear layers, or train it whole: peft.modules_to_save"))


def _refuse_tied(where: str, model: nn.Module, names: list[str]) -> None:
    """Two modules with one weight: an adapter, or a copy that is trained, would part them."""
    users: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        users[id(parameter)] = users.get(id(parameter), 0) + 1
    tied = [name for name in names if any(users[id(p)] > 1 for p in model.get_submodule(name).parameters())]
    if tied:
        why = "its weights are tied to another module's, and would no longer be"
        fix = "leave it out, or begin with a model of untied weights"
        raise UserError(Problem(where, ", ".join(tied[:LISTED]), why, fix))


def describe(model: Any) -> dict[str, Any] | None:
    """What is needed to export the adapter in `model`: PEFT's configuration, and layers that store their weights
    transposed. None where there is no adapter."""
    if not hasattr(model, "peft_config"):
        return None
    fields = model.peft_config[NAME].to_dict() | {"inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()}
    transposed = [name for name, module in model.named_modules() if getattr(module, "fan_in_fan_out", False)]
    return {"config": json.loads(json.dumps(plain)), "transposed": transposed}
