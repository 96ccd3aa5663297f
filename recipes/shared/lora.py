"""A model -> the same model, frozen, with a LoRA adapter inside; a checkpoint of one -> what an export writes of it.

Used when a model is built, when a checkpoint describes it, and by export. PEFT does the first and nothing else.
Must never adapt fewer layers than were asked for, or one whose weights another layer shares.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from launcher.errors import Problem, UserError
from launcher.plan import Plan
from recipes.shared.checkpoint.reader import Checkpoint, Entry
from recipes.shared.hf_config import is_encoder_decoder

ADAPTER, ADAPTER_CONFIG, MERGED = "adapter", "adapter_config.json", "merged"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NAME = "default"  # what PEFT calls an adapter that nobody named
PREFIX = "base_model.model."  # before every name in a model with an adapter
SAVED, ORIGINAL, BASE = f".modules_to_save.{NAME}", ".original_module", ".base_layer"
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


def base_of(model: Any) -> Any:
    """The model without what PEFT puts around it."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def describe(model: Any) -> dict[str, Any] | None:
    """What is needed to export the adapter in `model`: PEFT's configuration, and layers that store their weights
    transposed. None where there is no adapter."""
    if not hasattr(model, "peft_config"):
        return None
    fields = model.peft_config[NAME].to_dict() | {"inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()}
    transposed = [name for name, module in model.named_modules() if getattr(module, "fan_in_fan_out", False)]
    return {"config": json.loads(json.dumps(plain)), "transposed": transposed}


def base_name(name: str) -> str | None:
    """What the model without an adapter calls that parameter; None for the adapter's own matrices."""
    if not name.startswith(PREFIX):
        return name
    if ".lora_" in name:
        return None
    name = name.removeprefix(PREFIX)
    for part in (SAVED, ORIGINAL, BASE):
        name = name.replace(part, "")
    return name


@dataclass(frozen=True)
class Merged:
    """The weight of an adapted layer with the adapter in it: W + scale x B A, computed in fp32."""

    base: Entry
    a: Entry
    b: Entry
    scale: float
    transposed: bool
    name: str
    dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return self.base.shape

    @property
    def kind(self) -> str:
        """Whether the weight without the adapter was trained: it was not."""
        return self.base.kind

    def parts(self, at_most: int) -> Iterator[torch.Tensor]:
        """The elements in order, in flat tensors of up to `at_most` elements, or of one row."""
        left, right = self.b.read().float(), self.a.read().float()
        if self.transposed:
            left, right = right.T, left.T
        rows, columns = self.shape
        step = max(1, at_most // columns)
        for start in range(0, rows, step):
            product = left[start : start + step] @ right
            weight = torch.empty(product.numel(), dtype=self.base.dtype)
            self.base.read_into(weight, start * columns)
            yield weight.float() + self.scale * product.reshape(-1)


def exported(checkpoint: Checkpoint, adapter: dict[str, Any] | None, form: str) -> list[Entry | Merged]:
    """What an export writes: every tensor under its base model's name, the adapter merged into it, or the adapter alone
    as PEFT names it. Raises UserError when there is none to write alone."""
    if adapter is None:
        if form == ADAPTER:
            why = "the checkpoint is not one of a run with peft=lora"
            raise UserError(Problem("export.lora", ADAPTER, why, "leave it out"))
        return list(checkpoint)
    if form == ADAPTER:
        own = [entry for entry in checkpoint if ".lora_" in entry.name or SAVED in entry.name]
        return [dataclasses.replace(entry, name=_peft_name(entry.name)) for entry in own]
    entries = {entry.name: entry for entry in checkpoint}
    scale = adapter["config"]["lora_alpha"] / adapter["config"]["r"]
    found: list[Entry | Merged] = []
    for entry in checkpoint:
        name = base_name(entry.name)
        if name is None or ORIGINAL in entry.name:
            continue
        layer = entry.name.removesuffix(f"{BASE}.weight")
        if layer == entry.name:
            found.append(dataclasses.replace(entry, name=name))
        else:
            a, b = (entries[f"{layer}.{matrix}.{NAME}.weight"] for matrix in ("lora_A", "lora_B"))
            found.append(Merged(entry, a, b, scale, layer in adapter["transposed"], name))
    return found


def _peft_name(name: str) -> str:
    """The name in adapter_model.safetensors, which does not tell which of several adapters it is."""
    return name.replace(SAVED, "").replace(f".{NAME}.", ".")
