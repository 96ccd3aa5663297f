"""Which modules of a model are mixtures of experts: told by what is in them, of whatever family they are.

Used where the engine is built and where a model is profiled.
Must never load DeepSpeed: a profile needs none of it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

MATRICES = 3  # dimensions of one parameter that holds a matrix for each expert


def is_mixture(module: nn.Module) -> bool:
    """Whether a child of `module` is called experts, and holds several modules or one matrix for each expert."""
    return has_separate_experts(module) or any(_holds_matrices(child) for child in _experts_of(module))


def has_separate_experts(module: nn.Module) -> bool:
    """Whether its experts are modules of their own, of which only those that are used get a gradient."""
    return any(isinstance(child, nn.ModuleList | nn.ModuleDict) and len(child) > 1 for child in _experts_of(module))


def _experts_of(module: nn.Module) -> list[nn.Module]:
    return [child for name, child in module.named_children() if "expert" in name]


def _holds_matrices(child: nn.Module) -> bool:
    """Its parameters get a gradient as a whole, whichever experts are used."""
    shapes: list[Any] = [getattr(own, "ds_shape", own.shape) for own in child.parameters(recurse=False)]
    return any(len(shape) >= MATRICES for shape in shapes)


def names_of(module: nn.Module) -> set[str]:
    """What a request may call the class of `module`: its name, alone or behind its file's."""
    kind = type(module)
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
