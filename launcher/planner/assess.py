"""Request -> predicted memory of a rank, moment by moment.

Called when a plan is built. Pure: the profile of the model, where there is one, was measured before.
Must never load torch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial

from launcher.planner.flat import Flat
from launcher.planner.ledger import Places
from launcher.planner.partitioned import Partitioned
from launcher.planner.prediction import Memory
from launcher.planner.profile import Profile
from launcher.planner.replicated import Replicated
from launcher.planner.setup import Setup
from launcher.planner.sharded import Sharded
from launcher.planner.walk import Engine, walk


def memory_of(setup: Setup, profile: Profile) -> Memory:
    """Every moment of a run's first steps at its highest point, and what lies on the host, of the fullest rank."""
    if setup.stage in (1, 2):
        flat = Flat(profile, setup.world_size)
        walks = [_walked(setup, profile, partial(Partitioned, rank=rank, flat=flat)) for rank in flat.fullest()]
    else:
        walks = [_walked(setup, profile, Sharded if setup.stage == 3 else Replicated)]
    return max(walks, key=lambda memory: memory.peak.total_bytes + memory.host_bytes)


def least_of(setup: Setup, profile: Profile) -> Memory:
    """What a rank needs however little a pass may keep: the walk without one, in a hundredth of its time.

    Never more than `memory_of`: a pass only adds to what is there when the engine is built and when it steps.
    """
    return memory_of(setup, dataclasses.replace(profile, events=()))


def _walked(setup: Setup, profile: Profile, make: Callable[..., Engine]) -> Memory:
    places = Places(setup.one_memory)
    walk(make(setup, profile, places), places.device, profile, setup.accumulation)
    host = {} if setup.one_memory else places.host.peak()
    kept = Counter(places.device.terms)
    if places.host is not places.device:
        kept.update(places.host.terms)
    resident = {term: size for term, size in kept.items() if size}
    return Memory(places.device.moments(), host, places.disk.peak(), profile.measured, resident)
