"""Finds mixtures of experts, of which each rank may use other parts, and makes ranks agree on what they exchange.

Called by `engine` on every rank before the engine stands. DeepSpeed 0.19.8 was seen, with ranks that use other experts,
to compute with other weights than were meant and then to hang (stage 3), to add up gradients of different experts
(stage 2), and to crash (stage 1).
Must never leave a class that was asked for unfound: it is an error, by name.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.utils.z3_leaf_module import set_z3_leaf_module, z3_leaf_module
from torch import nn

from launcher.errors import Problem, UserError
from launcher.plan import Plan
from recipes.shared.mixtures import has_separate_experts, is_mixture, names_of

LISTED = 8


def mark_leaf_modules(plan: Plan, model: nn.Module) -> None:
    """Mixtures found in the model, and modules of the classes in `model.leaf_modules`. Any rank.

    Stage 3 fetches each of them whole. At stage 1 idle parameters get gradients of zeros; stage 0 gives them those by
    itself. Raises UserError for a class, or for a name in DeepSpeed's own `leaf_module` block, that the model does not
    have; and at stage 2, which adds up gradients in the order in which they come, and it differs between ranks.
    """
    wanted = plan.config.model.leaf_modules
    block = plan.deepspeed.get("zero_optimization", {}).get("leaf_module", {})
    where = "deepspeed.zero_optimization.leaf_module"
    modules = dict(model.named_modules())
    classes = {name for module in modules.values() for name in names_of(module)}
    _refuse_unknown(model, "model.leaf_modules", wanted, classes)
    _refuse_unknown(model, f"{where}.classes", block.get("classes", []), classes)
    _refuse_unknown(model, f"{where}.names", block.get("names", []), set(modules))
    for module in modules.values():
        named = bool(names_of(module) & set(wanted))
        if plan.zero_stage == 3 and (named or is_mixture(module)):
            set_z3_leaf_module(module, True)
        elif plan.zero_stage in (1, 2) and plan.world_size > 1 and (named or has_separate_experts(module)):
            _refuse_stage2(plan, type(module).__name__)
            module.register_forward_hook(_touch_all)


def leaf_classes(model: nn.Module) -> list[str]:
    """Classes of the modules that are fetched whole."""
    return sorted({type(module).__name__ for module in model.modules() if z3_leaf_module(module)})


def _touch_all(module: nn.Module, inputs: Any, output: Any) -> Any:
    """The output plus nothing of every trained parameter: whichever were used, all get a gradient."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not torch.is_grad_enabled() or not trained:
        return output
    nothing = torch.cat([parameter.reshape(-1)[:0] for parameter in trained]).sum()
    if torch.is_tensor(output):
        return output + nothing
    first, *rest = output
    return type(output)((first + nothing, *rest))


def _refuse_stage2(plan: Plan, name: str) -> None:
    if plan.zero_stage == 2:
        why = f"ranks may use other parts of {name}, and stage 2 adds up gradients in the order in which they come"
        raise UserError(Problem("zero", "stage2", why, "use zero=stage1 or zero=stage3, which train it alike"))


def _refuse_unknown(model: nn.Module, where: str, wanted: list[str], known: set[str]) -> None:
    unknown = [name for name in wanted if name not in known]
    if unknown:
        own = sorted({type(module).__name__ for module in model.modules() if any(module.children())})
        fix = f"its modules with others inside are {', '.join(own[:LISTED])}"
        raise UserError(Problem(where, ", ".join(unknown), "the model has no such module", fix))
