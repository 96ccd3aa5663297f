"""The shared train loop: fetch, forward and backward, step, log, evaluate, checkpoint, leave.

Called by recipes on every rank with an objective and the samples of two splits.
Must never branch on the stage, the offload or the recipe, and never let ranks disagree on what comes next.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from recipes.shared import watch
from recipes.shared.average import averaging
from recipes.shared.checkpoint.fixed_batch import SAMPLES
from recipes.shared.checkpoint.load import check_fixed_batch
from recipes.shared.checkpoint.save import save
from recipes.shared.data.order import sample_indices
from recipes.shared.data.samples import Grouped, Samples
from recipes.shared.distributed import say
from recipes.shared.engine import plain_grad_norm
from recipes.shared.evaluate import evaluate, on_device
from recipes.shared.losses import Batch, Objective
from recipes.shared.metrics import Metrics, record_compute_speed
from recipes.shared.own_losses import terms_of
from recipes.shared.parts import Parts
from recipes.shared.resident import fetch_at_once, nothing_is_partitioned
from recipes.shared.state import TrainState


def train(
    state: TrainState,
    training: Samples,
    validation: Samples,
    objective: Objective,
    metrics: Metrics,
    show: Callable[[], None] | None = None,
) -> None:
    """Trains from `state.step` to the plan's last step, or until a stop is asked for; ends with a checkpoint.

    `show`: called at each evaluation, on all ranks.
    """
    plan = state.plan
    steps = Steps(state, training, objective, metrics)
    evaluate_at, checkpoint_at = plan.config.eval.every, plan.config.checkpoint.every
    state.fixed_batch_loss = lambda: evaluate(state, validation, objective, SAMPLES)
    check_fixed_batch(state)
    steps.begin()
    stopping = False

    def look() -> bool:
        if show is not None:
            show()
        return judged(evaluate(state, validation, objective), state, metrics)

    while state.step < plan.config.run.steps and not stopping:
        stopping = steps.take()
        last = stopping or state.step == plan.config.run.steps
        better = False
        if last or (evaluate_at and state.step % evaluate_at == 0):
            better = look()
            stopping = stopping or state.ended_early
        last = last or stopping
        if last or (checkpoint_at and state.step % checkpoint_at == 0) or (better and plan.config.checkpoint.best):
            metrics.flush()
            save(state, metrics.recorded(), wait=last)
            metrics.start()  # the save is no part of the next step
    if state.saved_step != state.step:
        look()
        metrics.flush()
        save(state, metrics.recorded())


def take_steps(state: TrainState, training: Samples, objective: Objective, metrics: Metrics) -> None:
    """The plan's steps and nothing else, or until a stop is asked for: no evaluation, no checkpoint. All ranks."""
    steps, stopping = Steps(state, training, objective, metrics), False
    steps.begin()
    while state.step < state.plan.config.run.steps and not stopping:
        stopping = steps.take()


class Steps:
    """What goes on from step to step: who listens for a stop, the parts that have norms, the average of the weights."""

    def __init__(self, state: TrainState, training: Samples, objective: Objective, metrics: Metrics) -> None:
        self.state, self.training, self.objective, self.metrics = state, training, objective, metrics
        self.stop = StopRequest(state)
        audit = state.plan.config.audit
        self.watched = 0 if audit.mode == "off" else audit.steps
        """Steps that the audit may still see with DeepSpeed's own hooks."""

    def begin(self) -> None:
        """Once the engine has what it goes on from. All ranks."""
        config = self.state.plan.config
        self.parts = Parts(self.state.engine, config.parameters.norms)
        self.average = averaging(self.state.engine, config.ema.decay)
        say(self.state.run, "training")
        self.metrics.start()

    def take(self) -> bool:
        """One step, recorded. All ranks; whether any was asked to stop."""
        self._settle()
        taken = take_step(self.state, self.training, self.objective, self.parts)
        if self.average is not None:
            self.average.update()

        watch.at("loss over all ranks")
        means, stopping, measure = self.stop.agree([taken.loss, *taken.terms.values()])
        terms = dict(zip(taken.terms, means[1:], strict=True))
        self.metrics.step(means[0], taken.lr, taken.grad_norm, terms, taken.part_norms)

        if measure:
            record_compute_speed(self.state)
        return stopping

    def _settle(self) -> None:
        """Once the audit has seen its steps, a model of which nothing is partitioned is fetched as a whole."""
        if self.watched == 0 and nothing_is_partitioned(self.state.engine):
            fetch_at_once(self.state.engine)
        self.watched -= 1


@dataclass
class Taken:
    """An optimizer step: this rank's part of the mean loss, of each of its terms, and what all ranks know of it."""

    loss: torch.Tensor
    terms: dict[str, torch.Tensor]
    lr: float
    grad_norm: torch.Tensor | None = None
    part_norms: dict[str, float] = field(default_factory=dict)


def take_step(state: TrainState, training: Samples, objective: Objective, parts: Parts) -> Taken:
    """Forward and backward of every micro-batch, then the optimizer's step. All ranks."""
    engine, nothing = state.engine, torch.zeros((), device=state.ranks.device)
    micro_batches = step_batches(state, training)
    taken = Taken(nothing.clone(), {}, float(engine.optimizer.param_groups[0]["lr"]))
    watch.arm(state.plan.config.watch.stall_s)
    for number, (batch, share) in enumerate(micro_batches, 1):
        watch.at("forward", state.step + 1)
        loss = objective.loss(engine, batch) * share
        watch.at("backward")
        engine.backward(loss)
        taken.loss += loss.detach()
        for name, term in terms_of(objective).items():
            taken.terms[name] = taken.terms.get(name, nothing) + term * share / len(micro_batches)
        if number == len(micro_batches):
            taken.grad_norm, taken.part_norms = plain_grad_norm(engine), parts.gradient_norms()
        watch.at("optimizer step" if number == len(micro_batches) else "accumulation")
        engine.step()
    state.step += 1
    taken.loss /= len(micro_batches)
    return taken


def judged(loss: float | None, state: TrainState, metrics: Metrics) -> bool:
    """Records an evaluation; whether it is the best so far. All ranks, with the loss that all agree on."""
    metrics.evaluation(loss)
    section = state.plan.config.eval
    better = state.best.see(loss, state.step, section.min_delta)
    state.ended_early = 0 < section.patience <= state.best.since and state.step < state.plan.config.run.steps
    return better


def step_batches(state: TrainState, training: Samples) -> list[tuple[Batch, float]]:
    """This rank's micro-batches of the next optimizer step on the device, and what the mean of each counts.

    The means of all micro-batches, each times its share, average to the mean over all samples of the step by weight,
    as if they were one batch: weights are known on every rank, so nothing is sent for it. Equal weights: shares of 1.

    Sample j of the step goes to micro-batch j // (micro x world), rank j // micro % world: the set of samples of
    a step, and so its mean gradient, is the same for every world size.
    """
    batch, ranks = state.plan.batch, state.ranks
    step = sample_indices(state.plan.config.run.seed, len(training), state.samples_seen, batch.global_batch_size)
    if isinstance(training, Grouped):
        step = training.grouped(step)
    indices = step.reshape(batch.gradient_accumulation_steps, ranks.world_size, batch.micro_batch_size)
    weights = training.weights(indices.reshape(-1)).reshape(indices.shape).sum(axis=2)
    shares = weights / (weights.sum() / weights.size)
    return [
        (on_device(training.batch(indices[micro, ranks.rank]), ranks.device), float(shares[micro, ranks.rank]))
        for micro in range(batch.gradient_accumulation_steps)
    ]


class StopRequest:
    """SIGTERM or SIGINT to this process, or the launcher's stop file: agreed on by all ranks at a step's end."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.signalled = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.signalled = True

    def agree(self, values: list[torch.Tensor]) -> tuple[list[float], bool, bool]:
        """(means over ranks, whether any was asked to stop, whether to measure speed), in one all-reduce."""
        run, main = self.state.run, self.state.ranks.is_main
        stop = self.signalled or (main and run.stop_request.exists())
        measure = main and run.measure_request.exists()
        asked = torch.tensor([float(stop), float(measure)], dtype=torch.float64, device=values[0].device)
        everything = torch.cat([asked, torch.stack(values).double()])
        dist.all_reduce(everything)
        stops, measures, *sums = everything.tolist()
        return [value / self.state.ranks.world_size for value in sums], stops > 0, measures > 0
