"""In a rank of the save bench: saves of one state at once and in the background, in turn, and steps beside the writing.

Called by `benches.rank` on an engine that goes on from a checkpoint.
Must never time a save while another one is still being written.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from benches.memory import PeakMemory, trim
from recipes.shared.checkpoint.fixed_batch import SAMPLES
from recipes.shared.checkpoint.load import restore
from recipes.shared.checkpoint.save import finish, save
from recipes.shared.data.corpus import open_corpus
from recipes.shared.data.prepare import corpus_folder
from recipes.shared.data.windows import TokenWindows
from recipes.shared.distributed import barrier
from recipes.shared.evaluate import evaluate
from recipes.shared.loop import step_batches
from recipes.shared.losses import CausalLM
from recipes.shared.state import TrainState

WARM_STEPS = 2  # the first steps of a process allocate what later ones use again


def work(state: TrainState, request: dict[str, Any]) -> dict[str, Any]:
    """All ranks. `pairs`: how often each kind is timed, after one of each that is not: memory is what that one took."""
    plan = state.plan
    restore(state)
    _, training, validation = open_corpus(corpus_folder(plan, state.ranks), plan.config.train.sequence_length)
    bench = Saves(state, training, validation)
    for _ in range(WARM_STEPS):
        bench.step_s()
    trim()
    first = bench.pair(0)  # without the loss on fixed samples: what that leaves free would hide what a save takes
    state.fixed_batch_loss = bench.fixed_loss
    timed = [bench.pair(number + 1) for number in range(request["pairs"])]
    return {name: [first[name]] if name.endswith("bytes") else [each[name] for each in timed] for name in first}


class Saves:
    """One state and what is done to it. `fixed_loss_s`: of the newest save, the loss on fixed samples within it."""

    def __init__(self, state: TrainState, training: TokenWindows, validation: TokenWindows) -> None:
        self.state, self.training, self.validation = state, training, validation
        self.fixed_loss_s = 0.0

    def pair(self, number: int) -> dict[str, Any]:
        """One of each kind, in an order that changes with `number`; then a background save with steps beside it."""
        kinds = [("at once", True), ("background", False)]
        found: dict[str, Any] = {}
        for name, wait in kinds if number % 2 else kinds[::-1]:
            found |= self.save(name, wait)
        return found | self.beside()

    def save(self, name: str, wait: bool) -> dict[str, float]:
        """One save with nothing beside it. `blocked_s`: without the loss on fixed samples; `committed_s`: with it."""
        barrier()
        with PeakMemory() as memory:
            start = time.perf_counter()
            save(self.state, {}, wait=wait)
            blocked_s = time.perf_counter() - start - self.fixed_loss_s
            finish(self.state)
            committed_s = time.perf_counter() - start
        return {
            f"{name}, blocked_s": blocked_s,
            f"{name}, fixed_loss_s": self.fixed_loss_s,
            f"{name}, committed_s": committed_s,
            f"{name}, memory_bytes": memory.grown_bytes,
        }

    def beside(self) -> dict[str, list[float]]:
        """Seconds of each step that began while any rank was writing, and of as many steps after that."""
        save(self.state, {}, wait=False)
        beside: list[float] = []
        while not beside or self._anyone_writes():
            beside.append(self.step_s())
        finish(self.state)
        return {"steps_beside_s": beside, "steps_alone_s": [self.step_s() for _ in beside]}

    def step_s(self) -> float:
        """Takes one optimizer step. All ranks; the time is that of the slowest."""
        start = time.perf_counter()
        for batch, share in step_batches(self.state, self.training):
            self.state.engine.backward(CausalLM().loss(self.state.engine, batch) * share)
            self.state.engine.step()
        self.state.step += 1
        barrier()
        return time.perf_counter() - start

    def fixed_loss(self) -> float | None:
        """What the train loop has every checkpoint record, timed."""
        start = time.perf_counter()
        loss = evaluate(self.state, self.validation, CausalLM(), SAMPLES)
        self.fixed_loss_s = time.perf_counter() - start
        return loss

    def _anyone_writes(self) -> bool:
        thread = self.state.writer.thread
        writing = torch.tensor([float(thread is not None and thread.is_alive())])
        dist.all_reduce(writing)
        return bool(writing)
