"""Stage 3: what DeepSpeed 0.19.8 allocates where every parameter is cut over all ranks.

Walked by `launcher.planner.walk`. Source: runtime/zero/stage3.py; what is whole when is `gathering`'s.
Must never serve another stage.
"""

from __future__ import annotations

from launcher.planner.gathering import Gathering, Limits
from launcher.planner.ledger import Places
from launcher.planner.profile import Event, Profile
from launcher.planner.setup import MASTER_BYTES, NORM_BYTES, Setup

LARGEST_NORMED = 250_000_000  # elements whose norm is taken at once (stage3.py, _constant_buffered_norm2)


class Sharded:
    """A share of each parameter, its gradient, master and moments."""

    def __init__(self, setup: Setup, profile: Profile, places: Places) -> None:
        self.setup, self.profile, self.ledger, self.host = setup, profile, places.device, places.host
        ranks = setup.world_size
        pieces = [-(-each.elements // ranks) for each in profile.parameters]
        self.share = sum(piece for piece, each in zip(pieces, profile.parameters, strict=True) if each.trained)
        self.frozen_share = sum(pieces) - self.share
        self.largest_group = min(self.share, max(setup.number("sub_group_size"), 1))
        self.gathering = Gathering(Limits.of(setup), profile, places.device)
        self.bucket_elements = setup.number("reduce_bucket_size")
        self.bucket: list[int] = []
        self.in_bucket = self.apart = 0
        self.stepped = False
        self.state_home = places.home(setup.offload_optimizer)
        self.weight_home = places.home(setup.offload_param)
        self.sum_home = places.host if setup.offload_optimizer else places.device

    def build(self) -> None:
        """Shares in their order, moved into one buffer; masters by way of a copy; gradients and the bucket for good."""
        setup, share = self.setup, self.share
        largest = max((each.elements for each in self.profile.parameters), default=0)
        self.weight_home.add("weights", setup.weight * (share + self.frozen_share))
        self.ledger.add("weights", self.profile.buffer_bytes)
        self.ledger.spike("one whole parameter", MASTER_BYTES * largest)
        self.weight_home.spike("defragmentation", setup.weight * share)
        self.state_home.add("master", MASTER_BYTES * share)
        self.state_home.spike(
            "copy of masters", MASTER_BYTES * self.largest_group if setup.weight != MASTER_BYTES else 0
        )
        self.sum_home.spike("gradients at first", MASTER_BYTES * self.largest_group)
        if setup.offload_optimizer:
            self.state_home.add("fp32 gradients", MASTER_BYTES * share)
        if setup.flag("contiguous_gradients"):
            self.ledger.add("reduce buckets", setup.sent * self.bucket_elements)
        self.sum_home.add("gradients", setup.accumulated * share)
        self._swap_buffers()
        hpz = setup.number("zero_hpz_partition_size")
        if hpz > 1:
            self.weight_home.add("secondary weights", setup.weight * -(-self.profile.trained // hpz))

    def _swap_buffers(self) -> None:
        """On the way to and from NVMe (swap_tensor/partitioned_optimizer_swapper.py, partitioned_param_swapper.py)."""
        setup = self.setup
        if setup.offload_optimizer == "nvme":
            count = setup.block_number("offload_optimizer", "buffer_count")
            self.host.add("swap buffers", count * MASTER_BYTES * self.largest_group)
        if setup.offload_param == "nvme":
            count = setup.block_number("offload_param", "buffer_count")
            self.host.add("swap buffers", count * setup.weight * setup.block_number("offload_param", "buffer_size"))

    def begin(self) -> None:
        """The coordinator starts over."""
        self.gathering.begin()

    def module(self, event: Event) -> None:
        """Parameters are gathered and released."""
        self.gathering.visit(event)

    def gradient(self, index: int, last: bool) -> None:
        """Into the bucket; one that is larger goes alone, as it is."""
        size = self.profile.parameters[index].elements
        if self.in_bucket and self.in_bucket + size > self.bucket_elements:
            self._reduce(last)
        moved = min(self.setup.weight * size, self.ledger.terms.get("activations", 0))
        self.ledger.add("activations", -moved)
        if self.in_bucket + size > self.bucket_elements or not self.setup.flag("contiguous_gradients"):
            self.apart += moved
            self.ledger.add("gradients on their way", moved)
        self.bucket.append(index)
        self.in_bucket += size

    def end(self, last: bool) -> None:
        """The rest is reduced."""
        self._reduce(last)

    def step(self) -> None:
        """Sub-group by sub-group: gradients flattened and cast, the optimizer, weights copied back."""
        setup = self.setup
        self.gathering.release_all()
        if not setup.offload_optimizer:
            self.ledger.spike("fp32 gradients", (MASTER_BYTES + self._flattened()) * self.largest_group)
            self.ledger.add("fp32 gradients", MASTER_BYTES * self.largest_group)
        if not self.stepped:
            self.state_home.add("moments", setup.state * self.share)
            self.state_home.add("average", setup.average * self.share)
            self.stepped = True
        self.state_home.spike("optimizer", setup.step_temporary * self.largest_group)
        if not setup.offload_optimizer:
            self.ledger.add("fp32 gradients", -MASTER_BYTES * self.largest_group)
        self.gathering.gather_persistent()

    def _flattened(self) -> int:
        """Bytes an element of the flat copy that is then cast; in fp32 it is the gradient itself."""
        return 0 if self.setup.accumulated == MASTER_BYTES else self.setup.accumulated

    def _reduce(self, last: bool) -> None:
        """Shares of all gradients in the bucket are laid out rank by rank in a copy (reduce_scatter_coalesced)."""
        if not self.bucket:
            return
        setup, ranks = self.setup, self.setup.world_size
        sizes = [self.profile.parameters[index].elements for index in self.bucket]
        alone = len(sizes) == 1 and sizes[0] % ranks == 0
        laid_out = 0 if alone or ranks == 1 else sum(-(-size // ranks) * ranks for size in sizes)
        if setup.offload_optimizer and last:
            piece = min(max(sizes) // ranks, LARGEST_NORMED)
            self.ledger.spike("communication", setup.sent * laid_out + NORM_BYTES * piece)
        cast = sum(sizes) if setup.sent != setup.weight else 0
        laid_out += sum(sizes) if setup.one_memory and ranks > 1 else 0  # gloo scatters a copy
        received = sum(sizes) // ranks if setup.accumulated != setup.sent else 0
        self.ledger.spike("communication", setup.sent * (laid_out + cast) + setup.accumulated * received)
        self.ledger.add("gradients on their way", -self.apart)
        self.bucket, self.in_bucket, self.apart = [], 0, 0
