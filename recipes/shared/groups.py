"""Model -> the optimizer's parameter groups, and which parameters are trained at all.

Called by `engine` on every rank, before the engine partitions anything, and by `load` after a restore.
Must never take a pattern that matches nothing for granted: it is an error, by name.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from torch import nn

from launcher.errors import Problem, UserError
from launcher.plan import Plan


def parameter_groups(plan: Plan, model: nn.Module) -> list[Any]:
    """What the optimizer gets: the trained parameters, or groups of them, those that no group takes first.

    Sets `requires_grad` to False on frozen ones. Any rank, the same on each; raises UserError for a pattern or group
    that matches nothing and for a model with nothing left to train.
    """
    freeze(plan, model)
    names = group_names(plan, model)
    if not any(names):
        raise UserError(Problem("parameters.frozen", "everything", "nothing is left to train", "freeze less"))
    declared = plan.config.parameters.groups
    empty = [number - 1 for number, group in enumerate(names) if number and not group]
    if empty:
        why = "it takes no trained parameter that a group before it does not take"
        fix = likes(dict(model.named_parameters()))
        raise UserError(*(Problem(f"parameters.groups.{number}", str(declared[number]), why, fix) for number in empty))
    parameters = dict(model.named_parameters())
    groups = [[parameters[name] for name in group] for group in names if group]
    if not declared:
        return groups[0]
    settings = hyper_parameters(plan, len(groups))
    return [{"params": group} | own for group, own in zip(groups, settings, strict=True)]


def group_names(plan: Plan, model: nn.Module) -> list[list[str]]:
    """Names of the trained parameters: those that no group takes, then each group's. Any rank."""
    declared = plan.config.parameters.groups
    taken: list[list[str]] = [[] for _ in (None, *declared)]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            fits = (number for number, group in enumerate(declared, 1) if _takes(group, name, parameter))
            taken[next(fits, 0)].append(name)
    return taken


def hyper_parameters(plan: Plan, count: int) -> list[dict[str, Any]]:
    """What the plan sets for each of the optimizer's `count` groups beside its parameters, in their order."""
    base = plan.deepspeed.get("optimizer", {}).get("params", {})
    rest: list[dict[str, Any]] = [{}] * (count - len(plan.config.parameters.groups))
    return rest + [
        ({"weight_decay": group["weight_decay"]} if "weight_decay" in group else {})
        | ({"lr": base["lr"] * group["lr_scale"]} if "lr_scale" in group else {})
        for group in plan.config.parameters.groups
    ]


def _takes(group: dict[str, Any], name: str, parameter: nn.Parameter) -> bool:
    dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
    named = bool(matching([name], group.get("match", ["*"])))
    return named and dimensions <= group.get("max_dim", dimensions)


def matching(names: Iterable[str], patterns: list[str]) -> list[str]:
    """The names that one of `patterns` fits, in their order."""
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def likes(names: Iterable[str]) -> str:
    """What a user whose pattern fits nothing should look at."""
    return f"names are like {', '.join(list(names)[:3])}"


def freeze(plan: Plan, model: nn.Module) -> None:
    """Parameters that `parameters.frozen` names are not trained; raises UserError for a pattern that fits none."""
    names = dict(model.named_parameters())
    for pattern in plan.config.parameters.frozen:
        found = matching(names, [pattern])
        if not found:
            raise UserError(Problem("parameters.frozen", pattern, "no parameter has such a name", likes(names)))
        for name in found:
            names[name].requires_grad_(False)
