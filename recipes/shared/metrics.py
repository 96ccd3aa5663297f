"""metrics.jsonl and the run's result: one object per optimizer step, evaluations with "eval_loss".

Made by recipes; the loop reports into it on every rank, rank 0 writes.
Must never talk to a tracker directly from the loop: the tracker's own thread does.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from launcher.rundir import write_json
from recipes.shared import memory_terms
from recipes.shared.canary import Canary
from recipes.shared.engine import global_grad_norm
from recipes.shared.state import TrainState
from recipes.shared.trackers import Tracker, tracked_as


class Metrics:
    """Writer of one run's metrics on rank 0; on the others every call is cheap and writes nothing."""

    def __init__(self, state: TrainState, tracker: Tracker) -> None:
        self.state, self.tracker = state, tracker
        self.file = state.run.metrics.open("a", encoding="utf-8") if state.ranks.is_main else None
        if tracker.run_id is not None:
            state.tracker_run_id, state.tracked_as = tracker.run_id, tracked_as(state.plan)
        self.clock = time.perf_counter()
        self.steps, self.seconds = 0, 0.0
        self.last: dict[str, Any] = {}
        self.canary = Canary()
        self.first_step_time: float | None = None
        self.moved = False
        """Whether a step was taken whose learning rate was above 0."""

    def start(self) -> None:
        """Starts the clock of the next step."""
        self.clock = time.perf_counter()

    def step(
        self,
        loss: float,
        lr: float,
        grad_norm: torch.Tensor | None,
        terms: Mapping[str, float],
        part_norms: Mapping[str, float],
    ) -> None:
        """Records the step just taken: mean loss over ranks, the learning rate it used, norm before clipping.

        `terms`: means of what the loss is the weighted sum of; `part_norms`: gradient norms of parts of the model.
        """
        now = time.perf_counter()
        elapsed, self.clock = now - self.clock, now
        self.first_step_time = self.first_step_time or time.time()
        self.steps += 1
        self.moved = self.moved or lr > 0
        self.seconds += elapsed if self.steps > 1 else 0.0  # the first step warms up
        norm = global_grad_norm(self.state.engine) if grad_norm is None else float(grad_norm)
        batch, length = self.state.plan.batch.global_batch_size, self.state.plan.config.train.sequence_length
        self._write(
            {
                "step": self.state.step,
                "loss": loss,
                "lr": lr,
                "grad_norm": norm,
                "step_s": round(elapsed, 6),
                "tokens_per_s": round(batch * length / elapsed, 3),
                "samples_seen": self.state.samples_seen,
                "peak_bytes": peak_bytes(self.state.ranks.device),
                **{f"loss/{name}": value for name, value in terms.items()},
                **{f"grad_norm/{name}": value for name, value in part_norms.items()},
            }
        )
        self.canary.see(self.state.step, loss, norm, int(self.state.engine.skipped_steps))

    def evaluation(self, loss: float | None) -> None:
        """Records an evaluation; its time does not count as a step's."""
        if loss is not None:
            self._write({"step": self.state.step, "eval_loss": loss, "samples_seen": self.state.samples_seen})
        self.clock = time.perf_counter()

    def recorded(self) -> dict[str, Any]:
        """The newest value of every field: goes into the checkpoint's manifest."""
        return {key: self.last[key] for key in ("loss", "eval_loss", "lr") if key in self.last}

    def flush(self) -> None:
        """Makes every record durable before a checkpoint refers to it."""
        if self.file is not None:
            self.file.flush()

    def finish(self, unigram_entropy: float | None, **facts: Any) -> None:
        """Ends the tracker and writes control/result.json, the proof that the run came to its end. Rank 0.

        `unigram_entropy`: of the training tokens, in nats; None where samples are no tokens. `facts`: what else the
        summary is to hold.
        """
        self.tracker.finish()
        if self.file is None:
            return
        self.file.close()
        state = self.state
        tokens = state.plan.batch.global_batch_size * state.plan.config.train.sequence_length
        rate = (self.steps - 1) * tokens / self.seconds if self.seconds else None
        write_json(
            state.run.result,
            {
                "steps": state.step,
                "stopped": state.step < state.plan.config.run.steps and not state.ended_early,
                "ended_early": state.ended_early,
                "best": state.best.recorded(),
                "final_train_loss": self.last.get("loss"),
                "final_eval_loss": self.last.get("eval_loss"),
                "unigram_entropy": unigram_entropy,
                "tokens_per_s": rate,
                "first_step_time": self.first_step_time,
                "peak_bytes": peak_bytes(state.ranks.device),
                "memory": memory_terms.measured(state.engine, state.ranks.device),
                "checkpoint": str(state.run.checkpoint(state.saved_step)) if state.saved_step is not None else None,
                "tracker_run_id": self.tracker.run_id,
                "tracker_sync": self.tracker.sync_command,
                **facts,
            },
        )

    def _write(self, record: dict[str, Any]) -> None:
        self.last |= record
        if self.file is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
            self.tracker.log(record)


def record_compute_speed(state: TrainState) -> None:
    """Times the same piece of arithmetic on every rank, for the launcher to see which host is slow. All ranks.

    Rank 0 answers the request with {"seconds": one a rank} in control/measured.json. The arithmetic takes about 50 ms.
    """
    device = state.ranks.device
    size = 4096 if device.type == "cuda" else 512
    matrix = torch.ones(size, size, device=device)
    times = []
    for _ in range(4):  # the first warms up
        dist.barrier()
        started = time.perf_counter()
        for _ in range(4):
            matrix = matrix @ matrix / size
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    every: list[Any] = [None] * state.ranks.world_size
    dist.all_gather_object(every, min(times[1:]))
    if state.ranks.is_main:
        state.run.measure_request.unlink(missing_ok=True)
        write_json(state.run.measured, {"step": state.step, "seconds": every})


def peak_bytes(device: torch.device) -> int:
    """Peak of allocated accelerator memory of this rank in bytes; on CPU the process's peak resident set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
