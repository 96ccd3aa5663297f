"""A model before and after its engine -> findings about its structure, which no call gives away.

Called when an engine is built, and when the audit ends, on every rank.
Must never gather a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.utils.z3_leaf_module import z3_leaf_module
from torch import nn

from recipes.shared.audit.findings import Findings
from recipes.shared.audit.register import Register


def check_before(model: nn.Module, register: Register, findings: Findings, world_size: int) -> None:
    """A model that is about to be partitioned, as far as it is not: whole parameters, sparse gradients, no elements."""
    for name, parameter in model.named_parameters():
        at, partitioned = register.line(parameter), hasattr(parameter, "ds_id")
        if not partitioned and world_size > 1:
            findings.add("unpartitioned", name, at)
        if parameter.requires_grad and (parameter.ds_numel if partitioned else parameter.numel()) == 0:
            findings.add("zero_size", name, at)
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            findings.add("sparse", f"{name}.weight", register.line(module.weight))


def fetched(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of what DeepSpeed makes whole at a time: the model, layers, and mixtures as one.

    What lies in a mixture is left out: ranks may use other parts of it.
    """
    if name == "" or model._parameters or z3_leaf_module(model):
        yield name, model
    if not z3_leaf_module(model):
        for part, child in model.named_children():
            yield from fetched(child, f"{name}.{part}".lstrip("."))


class Gradients:
    """Which trained parameters were ever given a gradient on this rank; an idle part of a mixture need not be."""

    def __init__(self, model: nn.Module) -> None:
        self.missing: dict[str, Any] = {}
        self.hooks = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not hasattr(parameter, "ds_z3_leaf_module"):
                self.missing[name] = parameter
                self.hooks.append(parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._seen(name)))

    def _seen(self, name: str) -> None:
        self.missing.pop(name, None)

    def remove(self) -> None:
        """Nothing is counted any more."""
        for hook in self.hooks:
            hook.remove()
