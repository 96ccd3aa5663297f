"""The parameters and modules of one engine: names, owners, where each was made, and which gathers are open.

Filled while a model is built and when its engine stands; asked by every part of the audit.
Must never keep a parameter alive: what is known of one lies on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR as DEPTH
from torch import nn

from recipes.shared.audit.origin import Line

_MADE = "audit_made"  # on a parameter: (line, name within its module)


@dataclass(eq=False)
class Gather:
    """One open gather whose edits nobody keeps."""

    parameters: list[Any]
    writes: dict[int, Line] = field(default_factory=dict)
    """Line of the first write into each parameter, by its id."""


class Register:
    """What is known of the parameters of this rank."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.names: dict[int, str] = {}
        self.modules: dict[int, str] = {}
        self.owners: dict[int, set[int]] = {}
        self.switches: dict[int, bool] = {}
        self.open_gathers: list[Gather] = []
        self.depth = 0

    def made(self, parameter: Any, module: nn.Module, name: str, at: Line | None) -> None:
        """A parameter was given to a module for the first time."""
        if at is not None and not hasattr(parameter, _MADE):
            setattr(parameter, _MADE, (at, f"{type(module).__name__}.{name}"))

    def line(self, parameter: Any) -> Line | None:
        """Where it was made."""
        known = getattr(parameter, _MADE, None)
        return None if known is None else known[0]

    def take(self, model: nn.Module) -> None:
        """The model of which an engine is about to be built."""
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.modules = {id(m): name for name, m in model.named_modules()}
        self.owners = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.owners.setdefault(id(parameter), set()).add(id(module))
        self.switches = {id(p): p.requires_grad for p in model.parameters()}

    def built(self, engine: Any) -> None:
        """The engine stands; forwards begin at this depth of DeepSpeed's stack of modules."""
        self.engine, self.depth = engine, len(parameter_offload.FWD_MODULE_STACK)

    def knows(self, parameter: Any) -> bool:
        """Whether it is one of the engine's."""
        return self.engine is not None and id(parameter) in self.names

    def trained(self, parameter: Any) -> bool:
        """Whether it was to be trained when the engine was built."""
        return self.switches[id(parameter)]

    def name(self, parameter: Any) -> str:
        """Its name in the model, or what is known of one that is in none."""
        known = self.names.get(id(parameter))
        made = getattr(parameter, _MADE, None)
        if known is None and made is not None:
            return str(made[1])
        return known or f"a parameter of shape {list(getattr(parameter, 'ds_shape', parameter.shape))}"

    def is_foreign(self, parameter: Any) -> bool:
        """Whether a forward is running of modules that neither own the parameter nor have it registered."""
        running = parameter_offload.FWD_MODULE_STACK[self.depth :]
        if not running or not self.knows(parameter):
            return False
        if not self.engine.module._parameters._in_forward:  # recomputed in backward, below the module that has it
            return False
        if getattr(parameter, "ds_persist", False) or getattr(parameter, DEPTH, 0):
            return False
        if hasattr(parameter, "ds_z3_leaf_module"):
            return False
        owners = self.owners[id(parameter)]
        return not any(id(m) in owners or id(parameter) in getattr(m, "_external_params", {}) for m in running)

    def note_write(self, address: int, at: Line) -> None:
        """Something was written to that address: into a parameter of an open gather, or elsewhere."""
        for gather in self.open_gathers:
            for parameter in gather.parameters:
                start = parameter.data_ptr()
                if start <= address < start + parameter.numel() * parameter.element_size():
                    gather.writes.setdefault(id(parameter), at)
