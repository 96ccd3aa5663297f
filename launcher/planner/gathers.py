"""Parameters in the order a model uses them -> elements that DeepSpeed gathers at stage 3, pass by pass.

Called by `launcher.planner.collectives`. It repeats what runtime/zero/partitioned_param_coordinator.py of DeepSpeed
0.19.8 does once it knows the order of modules: a parameter is kept when its next use is near or already prefetched.
Must never count parameters that persist: those are gathered once a step, by the optimizer.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.planner.parts import Block, Part

UNLIMITED = 2**62
Counts = dict[int, int]  # index of a parameter -> times


@dataclass(frozen=True)
class Limits:
    """DeepSpeed's stage3_* keys, in elements; its own values where the plan has none (runtime/zero/config.py)."""

    prefetch_bucket: int = 50_000_000
    max_live: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    param_persistence: int = 100_000
    model_persistence: int = UNLIMITED


@dataclass(frozen=True)
class Module:
    """A module as it is reached: indices of its own parameters, and from and to which its inner ones are, too."""

    own: tuple[int, ...]
    first: int
    end: int
    leaf: bool = False


@dataclass(frozen=True)
class Trace:
    """Elements of each parameter, which of them persist, and the modules of one forward and backward in their order.

    Many modules have no parameters of their own, and fetch ahead all the same.
    """

    sizes: tuple[int, ...]
    persistent: frozenset[int]
    forward: tuple[Module, ...]
    backward: tuple[Module, ...]


class _Node:
    """A Block with its parameters' indices."""

    def __init__(self, block: Block, sizes: list[int], layer: bool = False) -> None:
        first = len(sizes)
        sizes.extend(block.own)
        own = tuple(range(first, len(sizes)))
        self.inner = [_Node(inner, sizes) for inner in block.inner]
        self.module = Module(own, first, len(sizes), block.leaf)
        self.layer = layer

    def forward(self) -> list[Module]:
        return [self.module, *(module for node in self.inner for module in node.forward())]

    def backward(self, recomputed: bool) -> list[Module]:
        """Inner modules in reverse. Where a layer is recomputed, its forward runs again once the gradient of its last
        matrix is wanted."""
        found = [self.module, *(module for node in self.inner[::-1] for module in node.backward(recomputed))]
        if not (recomputed and self.layer):
            return found
        last = next((place for place, module in enumerate(found) if module.own), 0) + 1
        return found[:last] + self.forward()[1:] + found[last:]


@functools.lru_cache(maxsize=16)  # a table of stages and offloads asks for the same one many times
def gathers(parts: tuple[Part, ...], tied: bool, recomputed: bool, limits: Limits) -> tuple[Trace, Counts, Counts]:
    """A model's trace, and how often each parameter is gathered in forward and in backward of one micro-batch."""
    found = trace(parts, tied, recomputed, limits)
    return found, *gathered(found, limits)


def trace(parts: Sequence[Part], tied: bool, recomputed: bool, limits: Limits) -> Trace:
    """A model's trace: parts in order within the model, a head behind it; a tied table is the head again.

    `recomputed`: the forward of every layer runs again in its backward.
    """
    sizes: list[int] = []
    layers = [(part, part.name.endswith("layer")) for part in parts for _ in range(part.repeats)]
    nodes = [(part.name, _Node(part.block, sizes, layer)) for part, layer in layers]
    body = [node for name, node in nodes if name != "head"]
    head = [node.module for name, node in nodes if name == "head"]
    if tied:
        head.append(replace(body[0].module, own=body[0].module.own[:1]))
    root, inner = Module((), 0, len(sizes)), Module((), 0, body[-1].module.end)
    positions = Module((), 0, 0)  # of rotary embeddings, without parameters or a backward
    rest = [module for node in body[1:] for module in node.forward()]
    forward = [root, inner, *body[0].forward(), positions, *rest, *head]
    backward = [root, *head, inner, *(module for node in body[::-1] for module in node.backward(recomputed))]
    persistent, kept = set(), 0
    for index, size in enumerate(sizes):
        if size <= limits.param_persistence and kept + size <= limits.model_persistence:
            persistent.add(index)
            kept += size
    return Trace(tuple(sizes), frozenset(persistent), tuple(forward), tuple(backward))


def gathered(trace: Trace, limits: Limits) -> tuple[Counts, Counts]:
    """How often each parameter is gathered in the forward, and in the backward, of one micro-batch."""
    order = trace.forward + trace.backward
    next_use, before = _next_uses(order), [0]  # before: elements used before each module
    for module in order:
        before.append(before[-1] + sum(trace.sizes[index] for index in module.own))
    waiting = deque((step, index) for step, module in enumerate(order) for index in module.own)
    available, seen, live = set[int](), dict[int, int](), 0
    counts: tuple[Counts, Counts] = ({}, {})
    for step, module in enumerate(order):
        count = counts[step >= len(trace.forward)]
        wanted = [index for index in module.own if index not in trace.persistent and index not in available]
        for index in module.own:
            if seen.get(index, -1) < step:  # neither here nor further on was it asked for in advance
                seen[index] = waiting.popleft()[0]
        room = min(limits.max_live - live - sum(trace.sizes[index] for index in wanted), limits.prefetch_bucket)
        ahead = 0
        while waiting and ahead < room:
            when, later = waiting.popleft()
            seen[later] = max(seen.get(later, -1), when)
            if later not in trace.persistent and later not in available and later not in wanted:
                wanted.append(later)
                ahead += trace.sizes[later]
        for index in wanted:
            count[index] = count.get(index, 0) + 1
        available.update(wanted)
        live += sum(trace.sizes[index] for index in wanted)
        uses = next_use[step]
        near = {i for i in uses if before[uses[i]] - before[step + 1] < limits.max_reuse_distance}
        if module.leaf and _reached(module, order[step + 1 :], trace.sizes, limits.max_reuse_distance):
            near = set(module.own)
        for index in module.own:
            if index in available and index not in near and seen[index] <= step + 1:
                available.discard(index)
                live -= trace.sizes[index]
    return counts


def _reached(leaf: Module, later: Sequence[Module], sizes: Sequence[int], distance: int) -> bool:
    """Whether a module around the leaf comes before `distance` elements are used: of leaf modules, DeepSpeed counts
    every module with all that is inside (`recurse` in __params_to_release), and so finds them in their parents too."""
    used = 0
    for module in later:
        if used >= distance:
            return False
        if module.first <= leaf.first < module.end:
            return True
        used += sum(sizes[module.first : module.end])
    return False


def _next_uses(order: Sequence[Module]) -> list[dict[int, int]]:
    """Of each module's parameters, the next module that uses the same one."""
    latest: dict[int, int] = {}
    found: list[dict[int, int]] = [{} for _ in order]
    for step in range(len(order) - 1, -1, -1):
        own = order[step].own
        found[step] = {index: latest[index] for index in own if index in latest}
        latest.update(dict.fromkeys(own, step))
    return found
