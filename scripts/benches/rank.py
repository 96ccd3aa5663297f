"""A rank of a bench: joins the others, builds the plan's engine, does one piece of work and leaves its answer.

Started by `benches.group` through the stock `deepspeed` launcher with a request file.
Must never measure anything itself: the module that the request names does.
"""

# ruff: noqa: E402 - the checkout goes on the path first, in place of this folder

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(SCRIPTS.parent), str(SCRIPTS)]

from launcher.plan import read_plan
from launcher.rundir import RunDir, drop_shared_memory, write_json
from recipes.shared import distributed
from recipes.shared.engine import build_engine
from recipes.shared.model import build_model
from recipes.shared.state import TrainState


def main(request_file: Path) -> None:
    """All ranks. The answer of the work goes to a file of this rank's own beside the request."""
    request = json.loads(request_file.read_text(encoding="utf-8"))
    plan = read_plan(Path(request["plan"]))
    ranks = distributed.initialise(plan)
    engine = build_engine(plan, build_model(plan, ranks))
    assert plan.config.run.dir is not None
    state = TrainState(engine=engine, plan=plan, ranks=ranks, run=RunDir(plan.config.run.dir))
    answer = importlib.import_module(request["work"]).work(state, request)
    write_json(request_file.with_name(f"answer.rank{ranks.rank}.json"), answer)
    distributed.barrier()
    drop_shared_memory(os.environ.get("MASTER_PORT"))
    sys.stdout.flush()
    os._exit(0)  # as the product's workers leave


if __name__ == "__main__":
    main(Path(sys.argv[1]))
