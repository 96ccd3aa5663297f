"""Request -> predicted memory of a rank, moment by moment.

Called when a plan is built. Pure: the profile of the model, where there is one, was measured before.
Must never load torch.
"""

from __future__ import annotations

from collections import Counter

from launcher.planner.ledger import Ledger
from launcher.planner.partitioned import Partitioned
from launcher.planner.prediction import Memory
from launcher.planner.profile import Profile
from launcher.planner.replicated import Replicated
from launcher.planner.setup import Setup
from launcher.planner.sharded import Sharded
from launcher.planner.walk import Engine, walk


def memory_of(setup: Setup, profile: Profile) -> Memory:
    """Every moment of a run's first steps at its highest point, and what lies on the host."""
    ledger, host = Ledger(), Ledger()
    if setup.one_memory:
        host = ledger
    engine: Engine
    if setup.stage == 0:
        engine = Replicated(setup, profile, ledger)
    elif setup.stage == 3:
        engine = Sharded(setup, profile, ledger, host)
    else:
        engine = Partitioned(setup, profile, ledger, host)
    walk(engine, ledger, profile, setup.accumulation)
    peak = max(host.highest.values(), key=lambda point: point[0], default=(0, {}))[1]
    on_host = {} if setup.one_memory else {term: size for term, size in peak.items() if size}
    kept = Counter(ledger.terms)
    if host is not ledger:
        kept.update(host.terms)
    resident = {term: size for term, size in kept.items() if size}
    return Memory(ledger.moments(), on_host, {}, profile.measured, resident)
