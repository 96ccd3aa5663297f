"""Claims about gathers at stage 3: what two of them hold at once, on a CPU and on a device.

Run by pytest; scripts/bench planner and tests/train/test_memory_peaks.py compare whole steps with an allocator.
Must never need a model: modules, parameters and their order are made here.
"""

from __future__ import annotations

import pytest

from launcher.planner.gathering import COPY, WHOLE, Gathering, Limits
from launcher.planner.ledger import Ledger
from launcher.planner.profile import FORWARD, FORWARD_END, Event, Module, Parameter, Profile

BYTES, EACH = 4, 500  # of an element, elements of a parameter


def two_layers() -> Profile:
    """A model around an inner one around two layers of two parameters, passed forwards."""
    parameters = tuple(Parameter(f"p{index}", EACH, True) for index in range(4))
    every = (0, 1, 2, 3)
    modules = (Module("Outer", (), every), Module("Inner", (), every), Module("A", (0, 1)), Module("B", (2, 3)))
    order = [(FORWARD, 0), (FORWARD, 1), (FORWARD, 2), (FORWARD_END, 2), (FORWARD, 3), (FORWARD_END, 3)]
    return Profile(parameters, modules, tuple(Event(what, index, 0, 0) for what, index in order))


def limits(one_memory: bool) -> Limits:
    """Two ranks; a layer is fetched ahead at a time, and nothing stays whole."""
    return Limits(2, BYTES, one_memory, 2 * EACH, 10**9, 1, 0, 0)


@pytest.mark.parametrize(("one_memory", "copies"), [(True, 2), (False, 1)])
def test_gathers_that_are_under_way_at_once_are_all_held(one_memory: bool, copies: int) -> None:
    """Each has its flat output, and on a CPU the copy that gloo gathers into until it is waited for."""
    profile, ledger = two_layers(), Ledger()
    gathering = Gathering(limits(one_memory), profile, ledger)
    layer = 2 * EACH * BYTES
    gathering.begin()
    for event in profile.events:
        gathering.visit(event)
    gathering.release_all()
    gathering.begin()
    outer, inner, first, left, second, _ = profile.events
    gathering.visit(outer)
    assert (ledger.terms[COPY], ledger.terms.get(WHOLE, 0)) == (copies * layer, 0)
    gathering.visit(inner)
    assert ledger.terms[COPY] == 2 * copies * layer
    gathering.visit(first)
    assert (ledger.terms[COPY], ledger.terms[WHOLE]) == (copies * layer, layer)
    gathering.visit(left)
    gathering.visit(second)
    assert (ledger.terms[COPY], ledger.terms[WHOLE]) == (0, layer)
