"""Claims about gathers at stage 3: what two of them hold at once, on a CPU and on a device.

Run by pytest; scripts/bench planner and tests/train/test_memory_peaks.py compare whole steps with an allocator.
Must never need a model: modules, parameters and their order are made here.
"""

from __future__ import annotations

import pytest

from launcher.planner.gathering import COPY, GLOO_THREADS, WHOLE, Gathering, Limits
from launcher.planner.ledger import Ledger
from launcher.planner.profile import FORWARD, FORWARD_END, Event, Module, Parameter, Profile

BYTES, EACH = 4, 500  # of an element, elements of a parameter


def layers(outer: int, inner: int) -> Profile:
    """`outer` modules without parameters of their own around `inner` layers of two parameters, passed forwards."""
    parameters = tuple(Parameter(f"p{index}", EACH, True) for index in range(2 * inner))
    every = tuple(range(2 * inner))
    modules = tuple(Module("Outer", (), every) for _ in range(outer))
    modules += tuple(Module("Layer", (2 * at, 2 * at + 1)) for at in range(inner))
    order = [(FORWARD, index) for index in range(outer)]
    order += [(what, outer + at) for at in range(inner) for what in (FORWARD, FORWARD_END)]
    return Profile(parameters, modules, tuple(Event(what, index, 0, 0) for what, index in order))


def limits(one_memory: bool) -> Limits:
    """Two ranks; a layer is fetched ahead at a time, and nothing stays whole."""
    return Limits(2, BYTES, one_memory, 2 * EACH, 10**9, 1, 0, 0)


def after_a_pass(one_memory: bool, profile: Profile) -> tuple[Gathering, Ledger]:
    """The coordinator when it knows the order."""
    ledger = Ledger()
    gathering = Gathering(limits(one_memory), profile, ledger)
    gathering.begin()
    for event in profile.events:
        gathering.visit(event)
    gathering.release_all()
    gathering.begin()
    return gathering, ledger


@pytest.mark.parametrize(("one_memory", "copies"), [(True, 2), (False, 1)])
def test_gathers_that_are_under_way_at_once_are_all_held(one_memory: bool, copies: int) -> None:
    """Each has its flat output, and on a CPU the copy that gloo gathers into until it is waited for."""
    profile = layers(2, 2)
    gathering, ledger = after_a_pass(one_memory, profile)
    layer = 2 * EACH * BYTES
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


def test_no_more_gathers_have_a_copy_than_gloo_has_threads() -> None:
    profile = layers(5, 5)
    gathering, ledger = after_a_pass(True, profile)
    for event in profile.events[:5]:
        gathering.visit(event)
    assert ledger.terms[COPY] == (5 + GLOO_THREADS) * 2 * EACH * BYTES
