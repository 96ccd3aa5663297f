"""DeepSpeed's GatheredParameters, watched: edits that it would drop, and gathers of nothing.

Installed while an audit watches, on every rank.
Must never change what a gather does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from recipes.shared.audit.findings import Findings
from recipes.shared.audit.origin import accused, line
from recipes.shared.audit.register import Gather, Register

GATHERED = deepspeed.zero.GatheredParameters
NAMED = 3  # parameters of a gather that tell it from others


class Gathers:
    """`install` and `remove` a watch over every GatheredParameters of this process. `about_to`: told of each."""

    def __init__(self, register: Register, findings: Findings, about_to: Callable[[str], None]) -> None:
        self.register, self.findings, self.about_to = register, findings, about_to

    def install(self) -> None:
        """From now on every gather is watched."""
        self.original = {name: getattr(GATHERED, name) for name in ("__init__", "__enter__", "__exit__")}
        watch = self

        @functools.wraps(self.original["__init__"])
        def init(context: Any, params: Any, *args: Any, **kwargs: Any) -> None:
            given = list(params) if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else [params]
            watch.original["__init__"](context, given, *args, **kwargs)
            watch._refuse_nothing(context, given, kwargs.get("enabled", True))

        @functools.wraps(self.original["__enter__"])
        def enter(context: Any) -> None:
            watch._enter(context)

        @functools.wraps(self.original["__exit__"])
        def leave(context: Any, *error: Any) -> Any:
            return watch._leave(context, error)

        for name, method in (("__init__", init), ("__enter__", enter), ("__exit__", leave)):
            setattr(GATHERED, name, method)

    def remove(self) -> None:
        """Gathers are DeepSpeed's own again."""
        for name, method in self.original.items():
            setattr(GATHERED, name, method)

    def _refuse_nothing(self, context: Any, given: list[Any], enabled: bool) -> None:
        other = [value for value in given if not isinstance(value, torch.Tensor)]
        if enabled and not context.enabled and other:
            origin = accused()
            if origin is not None:
                self.findings.add("empty_gather", f"an object of {type(other[0]).__name__}", origin.line)

    def _enter(self, context: Any) -> None:
        if context.enabled:
            names = [self.register.name(parameter) for parameter in context.params]
            self.about_to(f"gather of {len(names)}: {', '.join(names[:NAMED])}")
        self.original["__enter__"](context)
        if context.enabled and context.src_rank is None:
            context.audit = Gather(context.params)
            self.register.open_gathers.append(context.audit)

    def _leave(self, context: Any, error: tuple[Any, ...]) -> Any:
        gather = context.__dict__.pop("audit", None)
        changed = []
        if gather is not None:
            self.register.open_gathers.remove(gather)
            if error[0] is None:
                changed = [parameter for parameter in gather.parameters if self._is_changed(parameter, gather)]
        result = self.original["__exit__"](context, *error)
        for parameter in changed:
            at = gather.writes.get(id(parameter)) or line()
            self.findings.add("lost_edit", self.register.name(parameter), at)
        return result

    def _is_changed(self, parameter: Any, gather: Gather) -> bool:
        """Whether a parameter is other than it was; under quantized gathers values differ anyway."""
        engine = self.register.engine
        if engine is not None and engine.zero_quantized_weights():
            return id(parameter) in gather.writes
        return _differs(parameter)


def _differs(parameter: Any) -> bool:
    """Whether this rank's elements are other than those of its shard. Swapped and quantized shards are not asked."""
    shard, whole = parameter.ds_tensor, parameter.data.reshape(-1)
    if shard.dtype != whole.dtype or shard.numel() == 0 or whole.numel() != parameter.ds_numel:
        return False
    start = dist.get_rank(parameter.ds_process_group) * shard.ds_numel
    mine = whole[start : start + shard.ds_numel].contiguous()
    kept = shard.data.reshape(-1)[: mine.numel()].to(mine.device)
    return not torch.equal(mine.view(torch.uint8), kept.view(torch.uint8))
