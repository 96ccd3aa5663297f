"""Plan -> what is minimised.

Called by recipes, and by the check of an export.
Must never differ between ranks.
"""

from __future__ import annotations

from launcher.plan import Plan
from recipes.shared.hf_config import is_encoder_decoder
from recipes.shared.losses import CausalLM, Objective, Seq2Seq
from recipes.shared.own_losses import Own, Several


def objective_of(plan: Plan) -> Objective:
    """What a model of this plan minimises."""
    weights = plan.config.train.objectives
    if plan.config.model.target is not None:
        return Several(weights) if weights else Own()
    return Seq2Seq() if is_encoder_decoder(plan.config.model.config) else CausalLM()
