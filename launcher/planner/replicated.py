"""Stage 0: what DeepSpeed 0.19.8 allocates where every rank holds everything.

Walked by `launcher.planner.walk`. Source: runtime/engine.py (buffered_allreduce_fallback, _take_model_step).
Must never serve another stage.
"""

from __future__ import annotations

from launcher.planner.ledger import Places
from launcher.planner.profile import Event, Profile
from launcher.planner.setup import MASTER_BYTES, Setup

LARGEST_REDUCED = 500_000_000  # elements flattened for one all-reduce (engine.py, MEMORY_OPT_ALLREDUCE_SIZE)


class Replicated:
    """Weights, gradients and moments whole; in 16 bits a master beside them."""

    def __init__(self, setup: Setup, profile: Profile, places: Places) -> None:
        self.setup, self.profile, self.ledger = setup, profile, places.device
        self.stepped = False

    def build(self) -> None:
        """The model in fp32, then in its own precision; masters beside 16 bits."""
        setup, trained = self.setup, self.profile.trained
        largest = max((each.elements for each in self.profile.parameters), default=0)
        self.ledger.add("weights", setup.weight * (trained + self.profile.frozen) + self.profile.buffer_bytes)
        if setup.one_memory:  # elsewhere the model is built on the host
            self.ledger.spike("model in fp32", MASTER_BYTES * largest)
        if setup.weight != MASTER_BYTES:
            self.ledger.add("master", MASTER_BYTES * trained)

    def begin(self) -> None:
        """Nothing is made for a micro-batch."""

    def module(self, event: Event) -> None:
        """Modules find their weights in place."""

    def gradient(self, index: int, last: bool) -> None:
        """A gradient of the first micro-batch stays as the parameter's own; further ones are added to it."""
        held = self.ledger.terms.get("gradients", 0)
        whole = self.setup.weight * self.profile.trained
        if held < whole:
            self.ledger.add("activations", -min(self._bytes(index), self.ledger.terms.get("activations", 0)))
            self.ledger.add("gradients", min(self._bytes(index), whole - held))

    def end(self, last: bool) -> None:
        """One all-reduce flattens up to LARGEST_REDUCED elements of the gradients."""
        if last and self.setup.world_size > 1:
            self.ledger.spike("communication", self.setup.weight * min(self.profile.trained, LARGEST_REDUCED))

    def step(self) -> None:
        """Moments are made in the first step; 16-bit gradients are copied to fp32 for it."""
        setup, trained = self.setup, self.profile.trained
        copied = MASTER_BYTES * trained if setup.weight != MASTER_BYTES else 0
        self.ledger.add("fp32 gradients", copied)
        if not self.stepped:
            self.ledger.add("moments", setup.state * trained)
            self.ledger.add("average", setup.average * trained)
            self.stepped = True
        largest = max((each.elements for each in self.profile.parameters if each.trained), default=0)
        self.ledger.spike("optimizer", setup.step_temporary * (largest if setup.one_memory else trained))
        self.ledger.add("fp32 gradients", -copied)
        self.ledger.set("gradients", 0)

    def _bytes(self, index: int) -> int:
        return self.setup.weight * self.profile.parameters[index].elements
