"""The run-time audit: watches from a model's construction to the end of the first steps, then takes itself away.

Begun by recipes on every rank in front of the model, ended by itself or by them; acts at stage 3 alone.
Must never be in the way afterwards: what it installs it removes, and audit=off installs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from launcher.plan import Plan
from launcher.rundir import RunDir, try_write, write_json
from recipes.shared.audit.access import Access
from recipes.shared.audit.findings import Finding, Findings, merged
from recipes.shared.audit.gathers import Gathers
from recipes.shared.audit.order import PATIENCE_S, Order
from recipes.shared.audit.origin import accused, line
from recipes.shared.audit.register import Register
from recipes.shared.audit.structure import Gradients, check_before, fetched

_CALLS = ("backward", "step", "save_checkpoint", "load_checkpoint")  # of the engine, each with collectives inside


def begin(plan: Plan, run: RunDir) -> Audit | None:
    """The audit of a run, watching from now on; None where there is none to be made. All ranks."""
    section = plan.config.audit
    if section.mode == "off" or plan.zero_stage != 3:
        return None
    audit = Audit(section.steps, section.mode == "strict", run)
    audit.install()
    return audit


def finish(audit: Audit | None) -> None:
    """Ends an audit, unless it has ended itself or there is none. All ranks."""
    if audit is not None:
        audit.finish()


class Audit:
    """Watches this process until its first engine has taken `steps` optimizer steps. All ranks.

    Findings go to the rank's log at once and to audit.json of `run` at the end; `strict` raises the first.
    """

    def __init__(self, steps: int, strict: bool, run: RunDir | None = None, patience_s: float = PATIENCE_S) -> None:
        self.steps, self.strict, self.run = steps, strict, run
        self.register, self.findings = Register(), Findings(dist.get_rank(), strict, self._write)
        self.order = Order(self.findings, patience_s)
        self.access = Access(self.register, self.findings)
        self.gathers = Gathers(self.register, self.findings, self.order.event)
        self.gradients: Gradients | None = None
        self.handles: list[Any] = []
        self.installed = False
        self.stepped = 0
        self.merged: list[Finding] = []

    def install(self) -> None:
        """Begins to watch."""
        self.installed = True
        self.initialize = deepspeed.initialize
        deepspeed.initialize = self._initialize
        self.handles = [
            hooks.register_module_parameter_registration_hook(self._parameter_joins),
            hooks.register_module_module_registration_hook(self._module_joins),
            register_optimizer_step_pre_hook(self._optimizer_steps),
        ]
        self.gathers.install()
        self.access.__enter__()

    def remove(self) -> None:
        """Takes everything away."""
        if not self.installed:
            return
        self.installed = False
        self.access.leave()
        self.gathers.remove()
        for handle in self.handles:
            handle.remove()
        deepspeed.initialize = self.initialize
        if self.gradients is not None:
            self.gradients.remove()
        if self.register.engine is not None:
            for name in (*_CALLS, "no_sync"):
                vars(self.register.engine).pop(name, None)

    def finish(self) -> None:
        """Merges what all ranks found and writes it (rank 0). All ranks; does nothing the second time."""
        if not self.installed:
            return
        missing = self.gradients.missing if self.gradients is not None and self.stepped else {}
        self.remove()
        for name in sorted(set.intersection(*map(set, self.order.exchange(set(missing))))):
            self.findings.add("no_gradient", name, self.register.line(missing[name]))
        every = self.order.exchange(list(self.findings.found.values()))
        self.order.close()
        self.merged = merged(finding for found in every for finding in found)
        if self.findings.rank == 0:
            self._write(self.merged)

    def _write(self, found: list[Finding]) -> None:
        """audit.json; of a run that ends with a finding, what a rank that raised it knows."""
        if self.run is not None:
            content = [dataclasses.asdict(finding) for finding in found]
            mode = "strict" if self.strict else "warn"
            try_write(write_json, self.run.audit, {"mode": mode, "steps": self.stepped, "findings": content})

    # --- what is called meanwhile ------------------------------------------------------------------------------------

    def _initialize(self, *args: Any, **kwargs: Any) -> Any:
        """deepspeed.initialize: the first engine is the one that is watched."""
        model = kwargs.get("model", args[1] if len(args) > 1 else None)
        if not isinstance(model, nn.Module) or self.register.engine is not None:
            return self.initialize(*args, **kwargs)
        self.register.take(model)
        check_before(model, self.register, self.findings, self.order.world_size)
        engine, *rest = self.initialize(*args, **kwargs)
        self.register.built(engine)
        self.gradients = Gradients(model)
        for name, module in fetched(model):
            self.handles.append(module.register_forward_pre_hook(self._forward(name), prepend=True))
        for name in _CALLS:
            setattr(engine, name, self._told(name, getattr(engine, name)))
        engine.no_sync = self._no_sync(engine.no_sync)
        return (engine, *rest)

    def _told(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.order.event(f"engine.{name}")
            before = self.register.engine.global_steps
            result = method(*args, **kwargs)
            if name == "step" and self.register.engine.global_steps > before:
                self._step_taken()
            return result

        return call

    def _step_taken(self) -> None:
        self.stepped += 1
        if self.stepped == self.steps:
            self.finish()

    def _forward(self, name: str) -> Callable[..., None]:
        """A hook, and no method: deepcopy of a module copies what its hooks are bound to."""

        def call(module: nn.Module, inputs: Any) -> None:
            if name == "" and torch.is_inference_mode_enabled():
                self.findings.add("inference_mode", type(module).__name__, line())
            self.order.event(name or type(module).__name__)

        return call

    def _no_sync(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.findings.add("no_sync", "engine.no_sync", line())
            return method(*args, **kwargs)

        return call

    def _parameter_joins(self, module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is None:
            return
        origin = accused()
        self.register.made(parameter, module, name, None if origin is None else origin.line)
        owner = self.register.modules.get(id(module)) if self.register.engine is not None else None
        if owner is not None and origin is not None and module._parameters.get(name) is not parameter:
            self.findings.add("late", f"{owner}.{name}".lstrip("."), origin.line)

    def _module_joins(self, parent: nn.Module, name: str, child: Any) -> None:
        owner = self.register.modules.get(id(parent)) if self.register.engine is not None else None
        if owner is None or child is None or id(child) in self.register.modules:
            return
        origin = accused()
        if origin is not None and next(child.parameters(), None) is not None:
            self.findings.add("late", f"{owner}.{name}".lstrip("."), origin.line)

    def _optimizer_steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if hasattr(parameter, "ds_id"):
                origin = accused()
                if origin is not None:
                    self.findings.add("optimizer", self.register.name(parameter), origin.line)
