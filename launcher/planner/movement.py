"""Request -> what one optimizer step moves and computes: collectives, bytes on every link, FLOPs, time.

Called when a plan is built. Reads the request; the figures come from the modules beside it.
Must never hold a formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.batch import Batch
from launcher.planner import hardware, shapes
from launcher.planner.collectives import Move, moves
from launcher.planner.links import links
from launcher.planner.outline import outline
from launcher.planner.profile import Profile
from launcher.planner.setup import Setup
from launcher.planner.timing import StepTime, time_of, work_of
from launcher.schema import RunConfig


@dataclass(frozen=True)
class Movement:
    """One optimizer step. FLOPs are None for a model of unknown shapes, the time on hardware of unknown speeds too."""

    collectives: tuple[Move, ...]
    links: dict[str, int]
    active_parameters: int | None
    flops: int | None
    time: StepTime | None


def movement_of(profile: Profile, setup: Setup, config: RunConfig, batch: Batch) -> Movement:
    """What a model moves and computes."""
    found = moves(profile, setup)
    share = -(-profile.trained // setup.world_size)
    on_links = links(found, setup, share)
    known = shapes.parameter_shapes(config.model.config) if config.model.target is None else None
    if known is None:
        return Movement(found, on_links, None, None, None)
    samples, length = batch.global_batch_size, config.train.sequence_length
    trained = None if profile.trained >= known.parameters else profile.trained
    work = work_of(known, samples, length, setup.recomputed, trained)
    time = time_of(work, samples * length, found, on_links, setup, share, hardware.read(config.hardware))
    return Movement(found, on_links, known.active, work.model_flops, time)


def outlined(parameters: int, config: RunConfig) -> Profile:
    """A model of which nothing was measured: by its shapes where they are known, else equal pieces of its size."""
    known = shapes.parameter_shapes(config.model.config) if config.model.target is None else None
    if known is None:
        return Profile.without_activations(parameters)
    peft, adapter = config.peft, None
    if peft.kind == "lora" and peft.rank is not None:
        adapter = shapes.adapter_parts(config.model.config, peft.rank, peft.target, peft.modules_to_save)
    return outline(known.parts, bool(known.tied_head), bool(config.activation.checkpointing), adapter or ())
