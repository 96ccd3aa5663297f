"""Takes a few real steps and measures the hardware they ran on: memory by moment, time, and how fast everything is.

Run on every rank by `recipes.worker`; the launcher makes hardware.json of what rank 0 leaves in control/result.json.
Must never evaluate or save: its user waits for the figures alone.
"""

from __future__ import annotations

from launcher.plan import Plan
from launcher.rundir import RunDir
from recipes.shared import distributed, memory_terms, speeds
from recipes.shared.data.splits import open_splits
from recipes.shared.effective import record_effective
from recipes.shared.engine import build_engine
from recipes.shared.loop import take_steps
from recipes.shared.metrics import Metrics
from recipes.shared.model import build_model
from recipes.shared.moments import Moments
from recipes.shared.objective import objective_of
from recipes.shared.state import TrainState
from recipes.shared.trackers import make_tracker


def run(plan: Plan, run_dir: RunDir) -> None:
    """All ranks. Ends with control/result.json, on rank 0."""
    ranks = distributed.initialise(plan)
    distributed.say(run_dir, "measuring the hardware")
    hardware = speeds.measured(plan, ranks)
    distributed.say(run_dir, "building the model")
    splits = open_splits(plan, ranks)
    moments = Moments(ranks.device)
    with moments.at("init"):
        engine = build_engine(plan, build_model(plan, ranks))
    record_effective(engine, plan, run_dir)
    moments.watch(engine)
    state = TrainState(engine=engine, plan=plan, ranks=ranks, run=run_dir, data_digest=splits.digest)
    metrics = Metrics(state, make_tracker(state))
    take_steps(state, splits.training, objective_of(plan), metrics)
    memory = memory_terms.measured(engine, ranks.device) | moments.highest()
    metrics.finish(splits.unigram_entropy, memory=memory, hardware=hardware | moments.found())
