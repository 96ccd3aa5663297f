"""Where the ranks of a plan meet, and the secrets that those on other hosts are given.

Used by `launcher.run` in front of every start and every look at the hosts.
Must never write a secret to a disk, or into the plan.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from launcher import env
from launcher.errors import EXIT_PREFLIGHT, Problem, UserError, raise_if
from launcher.onhost import secrets
from launcher.plan import Plan
from launcher.remote import Reach, run_script
from launcher.rundir import RunDir

SECRETS = Path(secrets.__file__)


def rendezvous(plan: Plan) -> tuple[str | None, int]:
    """Address (None: this machine's own) and port at which the ranks meet. Raises what `master_address` raises."""
    port = plan.config.cluster.master_port or free_port()
    return (None if plan.cluster.local else master_address(plan)), port


@contextlib.contextmanager
def secrets_on_hosts(run: RunDir, plan: Plan) -> Iterator[None]:
    """Puts this shell's secrets where the ranks of other hosts find them, for as long as the block runs.

    Ranks on this machine alone inherit them. Elsewhere: a file in each host's memory for each rank, 0600, which the
    rank removes when it has read it.
    """
    values = env.secrets()
    if plan.cluster.local or not values:
        yield
        return
    first, requests = 0, []
    for host in plan.cluster.hosts:
        ranks = range(first, first + len(host.slots))
        requests.append({"files": [str(run.secrets(rank)) for rank in ranks], "values": values})
        first += len(host.slots)
    names = [host.name for host in plan.cluster.hosts]
    answers = run_script(
        Reach(plan.config.cluster, False), names, SECRETS, requests, plan.config.check.timeout_s, answers=1
    )
    lost = [
        Problem(a.host, a.error, "it could not be given its secrets", "see mode=check") for a in answers if not a.facts
    ]
    raise_if(lost, EXIT_PREFLIGHT)
    yield


def master_address(plan: Plan) -> str:
    """cluster.master_addr, or the address that the first host's name has here; raises UserError when it has none."""
    if plan.config.cluster.master_addr:
        return plan.config.cluster.master_addr
    first = plan.cluster.hosts[0].name
    try:
        return str(socket.getaddrinfo(first, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        raise UserError(
            Problem(
                "cluster.master_addr",
                "nothing",
                f"the first host, {first}, does not resolve to an address here ({error})",
                "give cluster.master_addr=ADDRESS as the other hosts reach it",
            )
        ) from None


def free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
