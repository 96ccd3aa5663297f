"""Trains a model from its initial or given weights, or from the checkpoint the plan names.

Run on every rank by `recipes.worker`; reads like a table of contents.
Must never contain a training loop of its own: that is `recipes.shared.loop`.
"""

from __future__ import annotations

from launcher.plan import Plan
from launcher.rundir import RunDir
from recipes.shared import distributed
from recipes.shared.adapter import trained_targets
from recipes.shared.audit import auditor
from recipes.shared.checkpoint.load import restore
from recipes.shared.data.splits import open_splits
from recipes.shared.effective import record_effective
from recipes.shared.engine import build_engine
from recipes.shared.loop import train
from recipes.shared.metrics import Metrics
from recipes.shared.model import build_model
from recipes.shared.objective import objective_of
from recipes.shared.state import TrainState
from recipes.shared.trackers import make_tracker


def run(plan: Plan, run_dir: RunDir) -> None:
    """All ranks. Ends with a checkpoint and, on rank 0, control/result.json."""
    ranks = distributed.initialise(plan)
    audit = auditor.begin(plan, run_dir)
    distributed.say(run_dir, "building the model")
    splits = open_splits(plan, ranks)
    engine = build_engine(plan, build_model(plan, ranks))
    record_effective(engine, plan, run_dir)
    state = TrainState(engine=engine, plan=plan, ranks=ranks, run=run_dir, data_digest=splits.digest)
    restore(state)
    tracker = make_tracker(state)
    metrics = Metrics(state, tracker)
    train(state, splits.training, splits.validation, objective_of(plan), metrics)
    auditor.finish(audit)
    metrics.finish(splits.unigram_entropy, adapter=trained_targets(state, metrics.moved))
