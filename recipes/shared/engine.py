"""Model + plan -> DeepSpeed engine, and its gradient norm.

Called by recipes on every rank, once per process (a stage-3 engine is never freed).
Must never change the plan's dict: DeepSpeed gets a copy.
"""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import torch
from torch import nn

from launcher.errors import Problem, raise_if
from launcher.plan import Plan
from recipes.shared import gather, masters, startup
from recipes.shared.groups import parameter_groups
from recipes.shared.leaf_modules import mark_leaf_modules
from recipes.shared.reduction_order import watch_order
from recipes.shared.scalars import clip_scalars_too, sent_as_vectors

LISTED = 5


def build_engine(plan: Plan, model: nn.Module) -> Any:
    """The engine over `model` with the optimizer and schedule of the plan's DeepSpeed dict. All ranks."""
    startup.prepare(plan)
    _refuse_untrainable(model)
    parameters = parameter_groups(plan, model)
    mark_leaf_modules(plan, model)
    with sent_as_vectors(model):
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=parameters, config=copy.deepcopy(plan.deepspeed), dist_init_required=False
        )
    clip_scalars_too(engine)
    watch_order(plan, engine)
    masters.link(engine)
    return engine


def _refuse_untrainable(model: nn.Module) -> None:
    """What DeepSpeed fails on at every stage, in the first step and without a name: no elements, sparse gradients."""
    empty = [name for name, p in model.named_parameters() if p.requires_grad and gather.numel(p) == 0]
    sparse = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad
    ]
    problems = []
    if empty:
        why = f"{len(empty)} trained parameter(s) have no elements, and no engine can be built of them"
        fix = "leave out layers without inputs or outputs, or freeze them: requires_grad_(False)"
        problems.append(Problem("model", ", ".join(empty[:LISTED]), why, fix))
    if sparse:
        why = "DeepSpeed neither sums nor applies sparse gradients"
        problems.append(Problem("model", ", ".join(sparse[:LISTED]), why, "build the embedding with sparse=False"))
    raise_if(problems)


def global_grad_norm(engine: Any) -> float | None:
    """Norm of the averaged gradient over all parameters, before clipping, of the step just taken."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def plain_grad_norm(engine: Any) -> torch.Tensor | None:
    """The same norm at stage 0 in fp32, where the engine keeps none: call between the last backward and step."""
    if hasattr(engine.optimizer, "_global_grad_norm"):
        return None
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)
