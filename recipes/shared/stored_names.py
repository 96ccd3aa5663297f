"""Tensors as a Hugging Face folder stores them -> as the library's model holds them: experts in one tensor, new names.

Called by `pretrained` before names are compared. The library's own table of conversions is used, tensor by tensor.
Must never read a tensor before it is asked for: shapes are found on the meta device.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Stored:
    """One tensor in a folder."""

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class _Parts:
    """Stored tensors, in order, that make one or several of the model's; `name` is the first of those."""

    converter: Any
    name: str
    parts: list[tuple[str, str, Stored]]

    def convert(self, model: Any, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's tensors, by name, made of those of the parts."""
        converter = copy.deepcopy(self.converter)
        for (key, pattern, _), tensor in zip(self.parts, tensors, strict=True):
            converter.add_tensor(self.name, key, pattern, lambda tensor=tensor: tensor)
        made = converter.convert(self.name, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def as_held(model: Any, stored: dict[str, Stored]) -> dict[str, Stored]:
    """`stored` under the names, and in the shapes, of the model's own tensors, where the library converts them.

    Any rank. What is not converted stays as it is, and is compared by its name.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    if not isinstance(model, PreTrainedModel):
        return stored
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    owners = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names: dict[str, Any] = model.state_dict(keep_vars=True)
    rename = functools.partial(
        rename_source_key,
        weight_renamings=renamings,
        weight_converters=converters,
        base_model_prefix=model.base_model_prefix,
        meta_state_dict=names,
    )
    found: dict[str, Stored] = {}
    fused: dict[str, _Parts] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = (key, None) if key in names else rename(key)
        if pattern is None or name not in names:
            found[name if name in names else key] = stored[key]
        else:
            parts = fused.setdefault(name, _Parts(owners[pattern], name, []))
            parts.parts.append((key, pattern, stored[key]))
    for parts in fused.values():
        made = parts.convert(model, [torch.empty(part.shape, device="meta") for _, _, part in parts.parts])
        for name, tensor in made.items():
            found[name] = Stored(tuple(tensor.shape), functools.partial(_read, model, parts, name))
    return found


def _read(model: Any, parts: _Parts, name: str) -> torch.Tensor:
    return parts.convert(model, [part.read() for _, _, part in parts.parts])[name]
