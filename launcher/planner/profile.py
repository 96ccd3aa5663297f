"""The Profile value: parameters, modules and the sequence of events of one forward and backward pass.

Measured by `recipes.shared.timeline` for a model, a micro-batch and a length; walked by the planner's engines.
Must never hold a byte of a parameter: those depend on the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# What happens: a module's forward begins and ends, its backward begins and ends, a parameter's gradient is complete,
# the loss is there, backward is over.
FORWARD, FORWARD_END, BACKWARD, BACKWARD_END, GRADIENT, LOSS, END = 0, 1, 2, 3, 4, 5, 6
PIECES = 64  # into which a model is cut of which the number of parameters alone is known


@dataclass(frozen=True)
class Parameter:
    """One parameter, tied ones once."""

    name: str
    elements: int
    trained: bool


@dataclass(frozen=True)
class Module:
    """A module, and the indices of the parameters it holds itself."""

    kind: str
    parameters: tuple[int, ...]
    inside: tuple[int, ...] = ()
    """Its own and those of modules in it."""
    leaf: bool = False
    """Whether DeepSpeed gathers it as one (zero_optimization.leaf_module): a mixture of experts."""

    @property
    def fetched(self) -> tuple[int, ...]:
        """Parameters that are gathered for it."""
        return self.inside if self.leaf else self.parameters


@dataclass(frozen=True)
class Event:
    """`index` of a module or parameter; bytes of activations: the most since the last event, and now."""

    what: int
    index: int
    highest_bytes: int
    now_bytes: int


@dataclass(frozen=True, eq=False)  # as an object: what is worked out from it is kept by it
class Profile:
    """One pass over one micro-batch. `measured`: whether the events are a real model's."""

    parameters: tuple[Parameter, ...]
    modules: tuple[Module, ...]
    events: tuple[Event, ...]
    buffer_bytes: int = 0
    measured: bool = True

    @staticmethod
    def from_json(value: dict[str, Any]) -> Profile:
        """What `recipes.shared.timeline.record` wrote."""
        return Profile(
            tuple(Parameter(*each) for each in value["parameters"]),
            tuple(Module(kind, tuple(own), tuple(inside), leaf) for kind, own, inside, leaf in value["modules"]),
            tuple(Event(*each) for each in value["events"]),
            value["buffer_bytes"],
        )

    @staticmethod
    def without_activations(trained: int, frozen: int = 0) -> Profile:
        """Stands for a model of which only numbers of parameters are known: equal pieces, nothing kept for backward."""
        parameters = [*_cut(trained, True), *_cut(frozen, False)]
        modules = tuple(Module("unknown", (index,)) for index in range(len(parameters)))
        forward = [Event(what, i, 0, 0) for i in range(len(modules)) for what in (FORWARD, FORWARD_END)]
        backward = [Event(LOSS, -1, 0, 0)]
        for index in reversed(range(len(modules))):
            backward.append(Event(BACKWARD, index, 0, 0))
            if parameters[index].trained:
                backward.append(Event(GRADIENT, index, 0, 0))
            backward.append(Event(BACKWARD_END, index, 0, 0))
        events = (*forward, *backward, Event(END, -1, 0, 0))
        return Profile(tuple(parameters), modules, events, measured=False)

    @property
    def trained(self) -> int:
        """Elements of the parameters that are trained."""
        return sum(each.elements for each in self.parameters if each.trained)

    @property
    def frozen(self) -> int:
        """Elements of the others."""
        return sum(each.elements for each in self.parameters if not each.trained)


def _cut(elements: int, trained: bool) -> list[Parameter]:
    size = -(-elements // PIECES)
    sizes = [min(size, elements - start) for start in range(0, elements, size or 1)]
    return [Parameter(f"{'trained' if trained else 'frozen'} {i}", size, trained) for i, size in enumerate(sizes)]
