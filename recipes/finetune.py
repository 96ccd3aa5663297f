"""Trains given weights, or an adapter over them, on the responses of conversations.

Run on every rank by `recipes.worker`; reads like a table of contents.
Must never contain a training loop of its own: that is `recipes.shared.loop`.
"""

from __future__ import annotations

from launcher.plan import Plan
from launcher.rundir import RunDir
from recipes.shared import distributed
from recipes.shared.adapter import trained_targets
from recipes.shared.answers import Answers
from recipes.shared.apart import refuse_mixed, refuse_others
from recipes.shared.audit import auditor
from recipes.shared.checkpoint.load import restore
from recipes.shared.data.corpus import open_conversations
from recipes.shared.data.prepare import corpus_folder
from recipes.shared.effective import record_effective
from recipes.shared.engine import build_engine
from recipes.shared.loop import train
from recipes.shared.losses import CausalLM
from recipes.shared.metrics import Metrics
from recipes.shared.model import build_model
from recipes.shared.state import TrainState
from recipes.shared.trackers import make_tracker


def run(plan: Plan, run_dir: RunDir) -> None:
    """All ranks. Ends with a checkpoint and, on rank 0, control/result.json."""
    ranks = distributed.initialise(plan)
    refuse_others(plan)
    audit = auditor.begin(plan, run_dir)
    distributed.say(run_dir, "building the model")
    length, packing = plan.config.train.sequence_length, plan.config.data["packing"]
    meta, training, validation = open_conversations(corpus_folder(plan, ranks), length, packing)
    engine = build_engine(plan, build_model(plan, ranks))
    record_effective(engine, plan, run_dir)
    state = TrainState(engine=engine, plan=plan, ranks=ranks, run=run_dir, data_digest=meta.digest)
    restore(state)
    refuse_mixed(state, training)
    tracker = make_tracker(state)
    metrics = Metrics(state, tracker)
    train(state, training, validation, CausalLM(), metrics, Answers(state, validation, meta))
    auditor.finish(audit)
    metrics.finish(meta.unigram_entropy, data=training.counts(), adapter=trained_targets(state, metrics.moved))
