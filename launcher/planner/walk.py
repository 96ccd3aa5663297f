"""Walks through the first steps of a run, event by event, while an engine accounts for what it allocates.

Called by `launcher.planner.assess` with the engine of a stage.
Must never know a stage.
"""

from __future__ import annotations

from typing import Protocol

from launcher.planner.ledger import Ledger
from launcher.planner.profile import END, GRADIENT, LOSS, Event, Profile

STEPS = 2  # the optimizer's state and stage 3's trace exist from the second on


class Engine(Protocol):
    """What a stage allocates and frees. `last`: whether the micro-batch ends in an optimizer step."""

    def build(self) -> None:
        """The engine is initialised."""

    def begin(self) -> None:
        """A micro-batch begins."""

    def module(self, event: Event) -> None:
        """A module's forward or backward begins or ends."""

    def gradient(self, index: int, last: bool) -> None:
        """The gradient of a parameter is complete; its tensor is still among the activations."""

    def end(self, last: bool) -> None:
        """Backward is over."""

    def step(self) -> None:
        """The optimizer steps."""


def walk(engine: Engine, ledger: Ledger, profile: Profile, accumulation: int) -> None:
    """Two steps of at most two micro-batches each: further ones repeat the last."""
    engine.build()
    for _ in range(STEPS):
        for last in [False, True][-min(accumulation, 2) :]:
            ledger.begin("forward")
            engine.begin()
            for event in profile.events:
                rise = event.highest_bytes - ledger.terms.get("activations", 0)
                if rise > 0:
                    ledger.spike("activations", rise)
                ledger.set("activations", event.now_bytes)
                if event.what == LOSS:
                    ledger.begin("backward")
                elif event.what == GRADIENT:
                    engine.gradient(event.index, last)
                elif event.what == END:
                    ledger.set("activations", 0)
                    engine.end(last)
                else:
                    engine.module(event)
        ledger.begin("step")
        engine.step()
