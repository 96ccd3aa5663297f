"""Runs a recipe of the user's own: `recipe.target` is called with the plan and the run folder on every rank.

Run by `recipes.worker`; `recipes.pretrain` shows what a recipe is made of.
Must never add anything around it: what a recipe leaves out does not happen.
"""

from __future__ import annotations

from launcher.plan import Plan
from launcher.rundir import RunDir
from recipes.shared.own_code import load


def run(plan: Plan, run_dir: RunDir) -> None:
    """All ranks. The recipe writes control/result.json on rank 0 (`Metrics.finish`): without it no run is done."""
    target = plan.config.recipe.target
    assert target is not None, "a rule sees to that"
    load("recipe.target", target, plan.config.run.source)(plan, run_dir)
