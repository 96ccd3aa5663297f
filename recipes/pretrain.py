"""Trains a causal language model from its initial weights, or from the checkpoint the plan names.

Run on every rank by `recipes.worker`; reads like a table of contents.
Must never contain a training loop of its own: that is `recipes.shared.loop`.
"""

from __future__ import annotations

from launcher.plan import Plan
from launcher.rundir import RunDir
from recipes.shared import distributed
from recipes.shared.checkpoint.load import restore
from recipes.shared.data.corpus import open_corpus
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
    distributed.say(run_dir, "building the model")
    meta, training, validation = open_corpus(corpus_folder(plan, ranks), plan.config.train.sequence_length)
    engine = build_engine(plan, build_model(plan, ranks))
    record_effective(engine, plan, run_dir)
    state = TrainState(engine=engine, plan=plan, ranks=ranks, run=run_dir)
    restore(state)
    tracker = make_tracker(state)
    metrics = Metrics(state, tracker)
    train(state, training, validation, CausalLM(), metrics)
    metrics.finish(meta.unigram_entropy)
