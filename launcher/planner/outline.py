"""Shapes of a model -> a Profile of it without activations: its modules in the order in which they are used.

Made where nothing was measured; `launcher.planner.gathering` follows it as it follows a measured one.
Must never know a family: `launcher.planner.families` does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from launcher.planner.parts import Block, Part
from launcher.planner.profile import (
    BACKWARD,
    BACKWARD_END,
    END,
    FORWARD,
    FORWARD_END,
    GRADIENT,
    LOSS,
    Event,
    Module,
    Parameter,
    Profile,
)


class _Outline:
    """Parameters and modules as they are named, one after the other."""

    def __init__(self) -> None:
        self.parameters: list[Parameter] = []
        self.modules: list[Module] = []

    def node(self, block: Block, trained: bool, layer: bool = False, more: tuple[Block, ...] = ()) -> _Node:
        """A module with what is in it; `more`: trained modules beside those."""
        first, place = len(self.parameters), len(self.modules)
        self.parameters += [Parameter(f"parameter {first + i}", size, trained) for i, size in enumerate(block.own)]
        own = tuple(range(first, len(self.parameters)))
        self.modules.append(Module("", own))  # its place comes before that of what is in it
        inner = [self.node(each, trained) for each in block.inner] + [self.node(each, True) for each in more]
        self.modules[place] = Module("", own, tuple(range(first, len(self.parameters))), block.leaf)
        return _Node(place, inner, layer)

    def module(self, own: tuple[int, ...], inside: tuple[int, ...]) -> int:
        """A module that is no Block's."""
        self.modules.append(Module("", own, inside))
        return len(self.modules) - 1


class _Node:
    """A Block's place among the modules, and what is in it."""

    def __init__(self, place: int, inner: list[_Node], layer: bool) -> None:
        self.place, self.inner, self.layer = place, inner, layer

    def forward(self) -> list[int]:
        return [self.place, *(place for node in self.inner for place in node.forward())]

    def backward(self, recomputed: bool, modules: list[Module]) -> list[int]:
        """Inner modules in reverse. Where a layer is recomputed, its forward runs again once the gradient of its last
        matrix is wanted."""
        found = [self.place, *(place for node in self.inner[::-1] for place in node.backward(recomputed, modules))]
        if not (recomputed and self.layer):
            return found
        last = next((at for at, place in enumerate(found) if modules[place].parameters), 0) + 1
        return found[:last] + self.forward()[1:] + found[last:]


@functools.lru_cache(maxsize=16)  # a table of stages and offloads asks for the same one many times
def outline(parts: tuple[Part, ...], tied: bool, recomputed: bool, adapter: tuple[Part, ...] = ()) -> Profile:
    """Parts in order within the model, a head behind it; a tied table is the head again.

    `recomputed`: the forward of every layer runs again in its backward. `adapter`: trained matrices in every layer of a
    model that is frozen, and trained copies of whole modules behind it. Exact for those where parameters stay live from
    forward to backward; where they do not, autograd skips frozen layers below the first adapter, and a third is missed.
    """
    out = _Outline()
    matrices, copies = (adapter[0].block.inner, adapter[1:]) if adapter else ((), ())
    nodes = []
    for part in parts:
        layer = part.name.endswith("layer")
        more = matrices if part.name == "layer" else ()
        nodes += [(part.name, out.node(part.block, not adapter, layer, more)) for _ in range(part.repeats)]
    nodes += [(part.name, out.node(part.block, trained=True)) for part in copies]
    body, head = [node for name, node in nodes if name != "head"], [n.place for name, n in nodes if name == "head"]
    if tied:
        head.append(out.module(out.modules[body[0].place].parameters[:1], out.modules[body[0].place].inside))
    everything = tuple(range(len(out.parameters)))
    last = out.modules[body[-1].place].inside
    root, inner, positions = out.module((), everything), out.module((), everything[: last[-1] + 1]), out.module((), ())
    rest = [place for node in body[1:] for place in node.forward()]  # positions: rotary, without a backward
    forward = [root, inner, *body[0].forward(), positions, *rest, *head]
    backward = [root, *head, inner, *(place for node in body[::-1] for place in node.backward(recomputed, out.modules))]
    events = (*_events(forward, backward, out),)
    return Profile(tuple(out.parameters), tuple(out.modules), events, measured=False)


def _events(forward: list[int], backward: list[int], out: _Outline) -> Iterator[Event]:
    """Nothing is kept for backward; a gradient is complete when its parameter was used for the last time."""
    for place in forward:
        yield Event(FORWARD, place, 0, 0)
        yield Event(FORWARD_END, place, 0, 0)
    yield Event(LOSS, -1, 0, 0)
    last = {index: at for at, place in enumerate(backward) for index in out.modules[place].parameters}
    for at, place in enumerate(backward):
        yield Event(BACKWARD, place, 0, 0)
        for index in out.modules[place].parameters:
            if last[index] == at and out.parameters[index].trained:
                yield Event(GRADIENT, index, 0, 0)
        yield Event(BACKWARD_END, place, 0, 0)
    yield Event(END, -1, 0, 0)
