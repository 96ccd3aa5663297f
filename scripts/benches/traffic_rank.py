"""In a rank of the traffic bench: bytes of every collective that DeepSpeed's own logger counts in one optimizer step.

Called by `benches.rank` and by tests, on an engine that has taken no step.
Must never count a step before the third: at stage 3 the order of modules is learnt in the first two passes.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.comm import comm

from recipes.shared.state import TrainState

WARM_STEPS = 3
SCALAR_BYTES = 8  # norms, overflow flags and lengths: what is no longer than this is no tensor of the model


def work(state: TrainState, request: dict[str, Any]) -> dict[str, Any]:
    """All ranks. {"forward": {collective: bytes}, "backward": ..., "update": ...} of one step."""
    return count(state.engine, state.plan)


def count(engine: Any, plan: Any) -> dict[str, dict[str, int]]:
    """The same of `engine`, which takes WARM_STEPS + 1 steps on random tokens. All ranks."""
    config = plan.config.model.config
    shape = (plan.batch.gradient_accumulation_steps, plan.batch.micro_batch_size, plan.config.train.sequence_length)
    tokens = torch.randint(0, config["vocab_size"], shape)
    comm.comms_logger.enabled = comm.comms_logger.prof_all = True
    found: dict[str, dict[str, int]] = {}
    for _ in range(WARM_STEPS + 1):
        found = {"forward": {}, "backward": {}, "update": {}}
        comm.comms_logger.reset_data()
        for part in tokens:
            loss = engine(input_ids=part, labels=part).loss
            _take(found["forward"])
            engine.backward(loss)
            _take(found["backward"])
            engine.step()
            _take(found["update"])
    return found


def _take(found: dict[str, int]) -> None:
    """Adds what was logged since the last call; the logger's size is the tensor given to the collective."""
    for name, sizes in comm.comms_logger.comms_dict.items():
        moved = sum(size * record[0] for size, record in sizes.items() if size > SCALAR_BYTES)
        if moved:
            found[name] = found.get(name, 0) + moved
    comm.comms_logger.reset_data()
