"""A checkpoint of a model with a LoRA adapter -> what an export writes of it: the model, or the adapter alone.

Used by export; `lora` and `model` take the names from here. PEFT made the names, and is not needed to read them.
Must never write a layer whose adapter is left out in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.errors import Problem, UserError
from recipes.shared.checkpoint.entries import Checkpoint, Entry
from recipes.shared.elements import Array, as_torch

ADAPTER, ADAPTER_CONFIG, MERGED = "adapter", "adapter_config.json", "merged"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NAME = "default"  # what PEFT calls an adapter that nobody named
PREFIX = "base_model.model."  # before every name in a model with an adapter
SAVED, ORIGINAL, BASE = f".modules_to_save.{NAME}", ".original_module", ".base_layer"


def base_of(model: Any) -> Any:
    """The model without what PEFT puts around it."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


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
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return self.base.shape

    @property
    def kind(self) -> str:
        """Whether the weight without the adapter was trained: it was not."""
        return self.base.kind

    def parts(self, at_most: int) -> Iterator[Array]:
        """The elements in order, in flat arrays of up to `at_most` elements, or of one row."""
        left, right = self.b.read().float(), self.a.read().float()
        if self.transposed:
            left, right = right.T, left.T
        rows, columns = self.shape
        step = max(1, at_most // columns)
        for start in range(0, rows, step):
            product = left[start : start + step] @ right
            weight = np.empty(product.numel(), np.float32)
            self.base.read_into(weight, start * columns)
            yield (as_torch(weight) + self.scale * product.reshape(-1)).numpy()


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
