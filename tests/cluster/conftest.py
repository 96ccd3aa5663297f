"""Fixtures that hand tests a set of SSH hosts on this machine, or skip with the reason why there is none.

Called by pytest for everything in tests/cluster; a machine has one set of hosts at a time.
Must never leave hosts behind: they go when the session ends, passed, failed or interrupted.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.cluster import hosts
from tests.cluster.hosts import Hosts


@pytest.fixture(scope="session")
def make_hosts() -> Iterator[Callable[[int], Hosts]]:
    """make_hosts(N) -> N hosts that reach each other: the ones that are up, or new ones if those differ or are hurt.

    A call for another N replaces the hosts, and ends what runs on them.
    """
    if reason := hosts.why_unavailable():
        pytest.skip(reason)
    with hosts.claimed():
        try:
            yield hosts.ready
        finally:
            hosts.call("down", "--claimed")


@pytest.fixture
def two_hosts(make_hosts: Callable[[int], Hosts]) -> Hosts:
    """Two hosts, made once per session; looked at before each test and made anew where a test has hurt them."""
    return make_hosts(2)
