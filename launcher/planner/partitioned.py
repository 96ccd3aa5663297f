"""Stages 1 and 2: what DeepSpeed 0.19.8 allocates where weights are whole and the optimizer's state is not.

Walked by `launcher.planner.walk`. Source: runtime/zero/stage_1_and_2.py.
Must never serve another stage.
"""

from __future__ import annotations

from launcher.planner.flat import Flat
from launcher.planner.ledger import Places
from launcher.planner.profile import Event, Profile
from launcher.planner.setup import MASTER_BYTES, NORM_BYTES, Setup


class Partitioned:
    """Flat weights on every rank; masters and moments of its share."""

    def __init__(self, setup: Setup, profile: Profile, places: Places, rank: int, flat: Flat) -> None:
        self.setup, self.profile, self.ledger = setup, profile, places.device
        self.flat, self.rank = flat, rank
        self.owned = self.flat.owned(self.rank)
        self.bucket_elements = setup.number("reduce_bucket_size")
        self.bucket: list[int] = []
        self.in_bucket = 0
        self.stepped = self.kept = False
        self.separate = setup.accumulated != setup.weight  # gradients are added up in another precision
        self.home = places.home(setup.offload_optimizer)

    def build(self) -> None:
        """The model in fp32, cast, copied into the flat buffer; then the master of its share."""
        setup, flat, ledger = self.setup, self.flat, self.ledger
        trained, frozen = self.profile.trained, self.profile.frozen
        largest = max((each.elements for each in self.profile.parameters), default=0)
        ledger.add("weights", setup.weight * (trained + frozen) + self.profile.buffer_bytes)
        ledger.spike("flat copy", setup.weight * flat.padded)
        ledger.add("weights", setup.weight * (flat.padded - trained))
        if setup.weight != MASTER_BYTES:
            ledger.spike("flat copy", setup.weight * flat.share + (MASTER_BYTES * flat.share))
        self.home.add("master", MASTER_BYTES * flat.share)
        if setup.offload_optimizer:
            self.home.add("offloaded gradients", MASTER_BYTES * flat.share)
            self.home.add("weights on their way", setup.weight * (flat.share + largest))
            ledger.add("gradients on their way", setup.weight * largest)

    def begin(self) -> None:
        """Nothing is made for a micro-batch before its first gradient."""

    def module(self, event: Event) -> None:
        """Modules find their weights in place."""

    def gradient(self, index: int, last: bool) -> None:
        """Into the bucket as it comes, or kept as the parameter's own until backward is over (stage 1)."""
        self._buckets()
        size = self.profile.parameters[index].elements
        if self.setup.stage == 1 and self.separate:
            self.ledger.set("gradients", min(self._gradients() + self.setup.accumulated * size, self._whole()))
        if self.setup.stage == 2 or (last and self.setup.flag("overlap_comm")):
            self._take(index)
        elif not self.separate:
            self._move(index)

    def end(self, last: bool) -> None:
        """What waited is reduced; the buckets are freed."""
        self._buckets()
        if self.setup.stage == 1 and last and not self.setup.flag("overlap_comm"):
            for index in self.flat.starts:
                self._take(index, held=True)
        if self.setup.stage == 1 and not last:
            return  # gradients and buckets stay for the next micro-batch
        self._reduce()
        self.kept = not last
        for term in ("gradients", "new gradients", "reduce buckets"):
            self.ledger.set(term, 0)

    def step(self) -> None:
        """The share's gradients are flattened and cast; moments are made in the first step."""
        setup, share = self.setup, self.flat.share
        self.kept = False
        self.ledger.set("gradients", 0)
        if not setup.offload_optimizer:
            self.ledger.spike("norms", NORM_BYTES * self.flat.largest_slice(self.rank))
            flattened = 0 if self.separate else setup.accumulated * share
            cast = 0 if setup.accumulated == MASTER_BYTES else MASTER_BYTES * share
            self.ledger.add("fp32 gradients", flattened + cast)
            self.ledger.set("fp32 gradients", MASTER_BYTES * share)
        self.ledger.set("own gradients", 0)
        if not self.stepped:
            self.home.add("moments", setup.state * share)
            self.home.add("average", setup.average * share)
            self.stepped = True
        self.home.spike("optimizer", setup.step_temporary * share)
        self.ledger.set("fp32 gradients", 0)
        if setup.one_memory and setup.world_size > 1:
            self.ledger.spike("communication", setup.weight * self.flat.padded)  # gloo gathers beside its output

    # --- the bucket --------------------------------------------------------------------------------------------------

    def _buckets(self) -> None:
        """Whole from the first gradient on, two with overlap_comm (setup_buckets)."""
        if self.setup.flag("contiguous_gradients") and not self.ledger.terms.get("reduce buckets"):
            each = self.staged * self.bucket_elements
            self.ledger.set("reduce buckets", each * (2 if self.setup.flag("overlap_comm") else 1))

    @property
    def staged(self) -> int:
        """Bytes of an element of the bucket: stage 1 stages what it adds up, stage 2 the gradients as they come."""
        return self.setup.accumulated if self.setup.stage == 1 else self.setup.weight

    def _take(self, index: int, held: bool = False) -> None:
        size = self.profile.parameters[index].elements
        if self.in_bucket + size > self.bucket_elements and self.bucket:
            self._reduce()
        if not held:
            self._free(index)
        if size > self.bucket_elements or not self.setup.flag("contiguous_gradients"):
            if not held:
                self.ledger.add("gradients", self.setup.weight * size)  # it goes alone, as it is
        elif held:
            self.ledger.add("gradients", -self.staged * size)
        self.bucket.append(index)
        self.in_bucket += size

    def _reduce(self) -> None:
        """All slices of one owner after the other are flattened for one all-reduce; what is ours is copied out."""
        if not self.bucket:
            return
        setup, elements = self.setup, self.in_bucket
        if setup.world_size > 1:
            copied = elements if self.flat.slices(self.bucket) > 1 else 0
            cast = elements if setup.sent != self.staged else 0
            self.ledger.spike("communication", self.staged * copied + setup.sent * cast)
        ours = [index for index in self.bucket if self.rank in self.flat.owners(index)]
        if ours and setup.offload_optimizer:
            if setup.stage == 2 and setup.accumulation > 1:
                self.home.set("accumulated gradients", setup.weight * self.owned)
            self.ledger.spike("norms", NORM_BYTES * max(self.flat.slice(index, self.rank) for index in ours))
        elif ours:
            self.ledger.set("new gradients" if self.kept else "own gradients", self._own())
        if elements > self.bucket_elements or not setup.flag("contiguous_gradients"):
            self.ledger.add("gradients", -min(self._gradients(), setup.weight * elements))
        self.bucket, self.in_bucket = [], 0

    def _own(self) -> int:
        """Bytes of the gradients of parameters that are wholly or partly ours; added up in fp32: of our share."""
        if self.setup.offload_optimizer:
            return 0
        if self.separate and self.setup.stage == 2:
            return self.setup.accumulated * self.flat.share
        return self.staged * self.owned

    # --- gradients that are the parameters' own ----------------------------------------------------------------------

    def _move(self, index: int) -> None:
        """From the activations to the gradients, unless one is there to be added to."""
        size = self.setup.weight * self.profile.parameters[index].elements
        if self._gradients() < self._whole():
            self._free(index)
            self.ledger.add("gradients", min(size, self._whole() - self._gradients()))

    def _free(self, index: int) -> None:
        size = self.setup.weight * self.profile.parameters[index].elements
        self.ledger.add("activations", -min(size, self.ledger.terms.get("activations", 0)))

    def _gradients(self) -> int:
        return self.ledger.terms.get("gradients", 0)

    def _whole(self) -> int:
        return self.setup.accumulated * self.profile.trained
