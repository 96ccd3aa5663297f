"""Which parameters are whole at which moment at stage 3: the order of gathers and releases DeepSpeed 0.19.8 follows.

Used by `launcher.planner.sharded`. Source: runtime/zero/partitioned_param_coordinator.py (fetch, prefetch, release) and
partition_parameters.py (AllGatherCoalescedHandle).
Must never decide by bytes what DeepSpeed decides by elements.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import deque
from dataclasses import dataclass, field

from launcher.planner.ledger import Ledger
from launcher.planner.profile import BACKWARD, END, FORWARD, GRADIENT, LOSS, Event, Profile
from launcher.planner.setup import Setup

WHOLE, COPY = "gathered parameters", "gather buffers"
GLOO_THREADS = 2  # torch's own number (ProcessGroupGloo.hpp, Options)
PASSES = 3  # the first learns the order, the second has what was gathered before it
Counts = dict[int, int]  # index of a parameter -> times


@dataclass(frozen=True)
class Limits:
    """What decides the gathers of a rank, beside the model: DeepSpeed's stage3_* keys, in elements, and its ranks."""

    ranks: int
    weight: int
    one_memory: bool
    prefetch_bucket: int
    max_live: int
    max_reuse_distance: int
    persistence: int
    model_persistence: int

    @staticmethod
    def of(setup: Setup) -> Limits:
        """Those of a request; stage3_allgather_sequential fetches nothing ahead but the next parameter."""
        prefetch = setup.number("stage3_prefetch_bucket_size")
        return Limits(
            ranks=setup.world_size,
            weight=setup.weight,
            one_memory=setup.one_memory,
            prefetch_bucket=1 if setup.zero.get("stage3_allgather_sequential") else prefetch,
            max_live=setup.number("stage3_max_live_parameters"),
            max_reuse_distance=setup.number("stage3_max_reuse_distance"),
            persistence=setup.number("stage3_param_persistence_threshold"),
            model_persistence=setup.number("stage3_model_persistence_threshold"),
        )


def persistent(profile: Profile, limits: Limits) -> set[int]:
    """Parameters that stay whole: small ones, as many as the whole model may keep (mark_persistent_parameters)."""
    left, found = limits.model_persistence, set()
    for index, each in enumerate(profile.parameters):
        if each.elements <= min(limits.persistence, left):
            found.add(index)
            left -= each.elements
    return found


def counted(profile: Profile, limits: Limits) -> tuple[Counts, Counts]:
    """How often each parameter is gathered in forward and in backward of a micro-batch, once the order is known."""
    return _counted(profile, dataclasses.replace(limits, ranks=min(limits.ranks, 2), weight=1, one_memory=False))


@functools.lru_cache(maxsize=32)  # a table of offloads, and of numbers of ranks, asks for the same one many times
def _counted(profile: Profile, limits: Limits) -> tuple[Counts, Counts]:
    """The same; bytes decide nothing, and any number of ranks gathers what two do."""
    gathering = Gathering(limits, profile, Ledger())
    counts: tuple[Counts, Counts] = ({}, {})
    for _ in range(PASSES):
        counts = ({}, {})
        gathering.begin()
        gathering.count = counts[0]
        for event in profile.events:
            if event.what == LOSS:
                gathering.count = counts[1]
            elif event.what not in (GRADIENT, END):
                gathering.visit(event)
        gathering.count = {}
        gathering.release_all()
        gathering.gather_persistent()
    return counts


@dataclass(eq=False)
class Handle:
    """One gather: its flat output lives until the last of its parameters has been waited for.

    On a CPU gloo gathers into a copy beside it, `beside_bytes`, which is surely gone when the first of them has been.
    """

    parameters: list[int]
    waiting: set[int] = field(default_factory=set)
    flat_bytes: int = 0
    beside_bytes: int = 0
    done: bool = False


class Gathering:
    """The coordinator of one rank: a first pass records the order of modules, later ones prefetch by it."""

    def __init__(self, limits: Limits, profile: Profile, ledger: Ledger) -> None:
        self.limits, self.profile, self.ledger = limits, profile, ledger
        self.elements = [each.elements for each in profile.parameters]
        self.ranks = limits.ranks
        self.count: Counts = {}
        self.order: list[int] = []
        self.complete = False
        self.persistent = persistent(profile, limits)
        self.whole: set[int] = set()
        self.flying: dict[int, Handle] = {}
        self.active: dict[int, set[int]] = {}
        self.beside_bytes = 0

    def begin(self) -> None:
        """A micro-batch begins (reset_step): the order is known once one has been recorded."""
        for index in list(self.flying):
            self._wait(index)
            self._release(index)
        if self.order and not self.complete:
            self.complete = True
            self._index_uses()
        self.at = 0
        self.available = 0
        self.fetched_for = dict.fromkeys(range(len(self.elements)), -1)
        self.queue = deque(self.uses) if self.complete else deque()

    def visit(self, event: Event) -> None:
        """A module's forward or backward begins (fetch) or ends (release)."""
        if event.what in (FORWARD, BACKWARD):
            self._fetch(event.index)
        else:
            self._leave(event.index)

    def release_all(self) -> None:
        """Before the optimizer's step nothing is whole (partition_all_parameters)."""
        self.active.clear()
        for index in list(self.flying):
            self._wait(index)
        for index in list(self.whole):
            self._release(index)

    def gather_persistent(self) -> None:
        """After it those that stay whole are gathered, one by one (_post_step)."""
        for index in self.persistent - self.whole:
            self.whole.add(index)
            self.ledger.add(WHOLE, self._padded(index))

    # --- fetch -------------------------------------------------------------------------------------------------------

    def _fetch(self, module: int) -> None:
        own = self.profile.modules[module].fetched
        if not self.complete:
            self.order.append(module)
        self._gather([index for index in own if index not in self.whole and index not in self.flying])
        for index in own:
            self.active.setdefault(index, set()).add(module)
            if index in self.flying:
                self._wait(index)
        if self.complete:
            self._prefetch(own)
        self.at += 1

    def _prefetch(self, own: tuple[int, ...]) -> None:
        new = {index for index in own if self.fetched_for[index] < self.at}
        passed: set[int] = set()
        while self.queue and len(passed) < len(new):
            index, step = self.queue.popleft()
            self.fetched_for[index] = step
            passed.add(index)
        room = min(self.limits.max_live - self.available, self.limits.prefetch_bucket)
        ahead: list[int] = []
        elements = 0
        while self.queue and elements < room:
            index, step = self.queue.popleft()
            missing = index not in self.whole and index not in self.flying and index not in ahead
            self.fetched_for[index] = max(self.fetched_for[index], step)
            if missing:
                ahead.append(index)
                elements += self.elements[index]
        self._gather(ahead)

    def _gather(self, indices: list[int]) -> None:
        """One parameter is gathered in place; several into one flat tensor, and copied out of it when waited for."""
        if not indices:
            return
        for index in indices:
            self.available += self.elements[index]
            self.count[index] = self.count.get(index, 0) + 1
        if self.ranks == 1:
            self.whole.update(indices)  # the partition is the parameter
            return
        handle, size = Handle(indices, set(indices)), sum(self._padded(index) for index in indices)
        if len(indices) == 1:
            self.ledger.add(WHOLE, size)
            handle.done = True
        else:
            handle.flat_bytes = size
            self.ledger.add(COPY, size)
        handle.beside_bytes = size
        for index in indices:
            self.flying[index] = handle
        self._copies()

    def _wait(self, index: int) -> None:
        handle = self.flying.pop(index)
        if handle.beside_bytes:
            handle.beside_bytes = 0
            self._copies()
        if not handle.done:
            handle.done = True
            for each in handle.parameters:
                self.ledger.add(WHOLE, self.limits.weight * self.elements[each])
        self.whole.add(index)
        handle.waiting.discard(index)
        if not handle.waiting:
            self.ledger.add(COPY, -handle.flat_bytes)

    def _copies(self) -> None:
        """Of the gathers under way as many run as gloo has threads; the others have no copy yet, or none any more."""
        if self.limits.one_memory:
            sizes = sorted(handle.beside_bytes for handle in set(self.flying.values()))
            before, self.beside_bytes = self.beside_bytes, sum(sizes[-GLOO_THREADS:])
            self.ledger.add(COPY, self.beside_bytes - before)

    # --- release -----------------------------------------------------------------------------------------------------

    def _leave(self, module: int) -> None:
        near = self.complete and self._leaf_is_near(module)
        for index in self.profile.modules[module].fetched:
            self.active.get(index, set()).discard(module)
            if not self.complete or (not near and self._may_go(index)):
                self._release(index)

    def _may_go(self, index: int) -> bool:
        """Not if it stays for good, was passed over by the prefetch, or is used again within max_reuse_distance."""
        if index in self.persistent or self.fetched_for[index] > self.at:
            return False
        uses = self.used_at[index]
        following = bisect.bisect_left(uses, self.at)
        if following == len(uses):
            return True
        between = self.traversed[uses[following]] - self.traversed[min(self.at, len(self.traversed) - 1)]
        return between >= self.limits.max_reuse_distance

    def _leaf_is_near(self, module: int) -> bool:
        """Whether a module around a leaf comes within max_reuse_distance: of leaf modules, DeepSpeed counts every
        module with all that is inside (`recurse` in __params_to_release), and so finds them in their parents too."""
        modules, used = self.profile.modules, 0
        if not modules[module].leaf:
            return False
        first = modules[module].inside[:1]
        for later in self.order[self.at :]:
            if used >= self.limits.max_reuse_distance:
                return False
            if set(first) <= set(modules[later].inside):
                return True
            used += sum(self.elements[index] for index in modules[later].inside)
        return False

    def _release(self, index: int) -> None:
        if index not in self.whole or self.active.get(index):
            return
        self.whole.discard(index)
        self.available -= self.elements[index]
        if self.ranks > 1:
            self.ledger.add(WHOLE, -min(self.ledger.terms.get(WHOLE, 0), self.limits.weight * self.elements[index]))
        if not self.whole and not self.flying:
            self.ledger.set(WHOLE, 0)  # what padding was left

    # --- what is known beforehand ------------------------------------------------------------------------------------

    def _index_uses(self) -> None:
        """Where in the order each parameter is used, and how many elements were passed before."""
        modules = self.profile.modules
        self.uses = [(index, at) for at, module in enumerate(self.order) for index in sorted(modules[module].fetched)]
        self.used_at: list[list[int]] = [[] for _ in self.elements]
        self.traversed = [0]
        for at, module in enumerate(self.order):
            for index in modules[module].parameters:
                self.used_at[index].append(at)
            size = sum(self.elements[index] for index in modules[module].parameters)
            self.traversed.append(self.traversed[-1] + size)

    def _padded(self, index: int) -> int:
        return self.limits.weight * -(-self.elements[index] // self.ranks) * self.ranks
