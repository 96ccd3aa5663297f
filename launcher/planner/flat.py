"""The flat partition that ZeRO's stages 1 and 2 cut the trained parameters into: who owns which of them.

Used by `launcher.planner.partitioned`. Source: runtime/zero/stage_1_and_2.py (nccl_start_alignment_factor).
Must never be used at stage 3, which cuts every parameter by itself.
"""

from __future__ import annotations

from launcher.planner.profile import Profile

ALIGNMENT = 2  # elements a rank (nccl_start_alignment_factor)
MOST_COMPARED = 32  # ranks


class Flat:
    """Trained parameters in their order, padded to a multiple of ALIGNMENT x ranks, cut into equal shares."""

    def __init__(self, profile: Profile, world_size: int) -> None:
        self.parameters, self.world_size = profile.parameters, world_size
        self.starts, place = {}, 0
        for index, each in enumerate(profile.parameters):
            if each.trained:
                self.starts[index] = place
                place += each.elements
        unit = ALIGNMENT * world_size
        self.padded = -(-place // unit) * unit
        self.share = self.padded // world_size

    def owners(self, index: int) -> range:
        """Ranks that own a part of the parameter."""
        start = self.starts[index]
        return range(start // self.share, (start + self.parameters[index].elements - 1) // self.share + 1)

    def owned(self, rank: int) -> int:
        """Elements of all parameters of which `rank` owns at least a part."""
        return sum(self.parameters[index].elements for index in self.starts if rank in self.owners(index))

    def slices(self, indices: list[int]) -> int:
        """Pieces of one owner each that these parameters, one after the other, consist of."""
        ranks = [rank for index in indices for rank in self.owners(index)]
        return sum(1 for at, rank in enumerate(ranks) if at == 0 or ranks[at - 1] != rank)

    def slice(self, index: int, rank: int) -> int:
        """Elements of the parameter that are this rank's."""
        start, first = self.starts[index], rank * self.share
        return max(0, min(start + self.parameters[index].elements, first + self.share) - max(start, first))

    def largest_slice(self, rank: int) -> int:
        """Elements of the largest piece of one parameter that is this rank's."""
        return max((self.slice(index, rank) for index in self.starts), default=0)

    def fullest(self) -> list[int]:
        """The ranks that can need most: one whose parameters reach furthest beyond its share, one with the largest
        piece. Of very many ranks the first and the last, where embeddings and heads are."""
        ranks = range(self.world_size) if self.world_size <= MOST_COMPARED else (0, self.world_size - 1)
        return sorted({max(ranks, key=self.owned), max(ranks, key=self.largest_slice)})
