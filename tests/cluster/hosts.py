"""Hosts to test on: SSH hosts made from network namespaces, driven through scripts/testcluster.

Called by tests/cluster/conftest.py, whose fixtures hand a `Hosts` to the tests.
Must never change hosts without holding the claim, so that two test sessions cannot take them from each other.
"""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "testcluster"
# Isolated from PYTHONPATH and the like, which may be meant for the command that `exec` becomes.
TESTCLUSTER = [sys.executable, "-I", "-S", str(SCRIPT)]
CLAIM = "\0zerolaunch-testcluster-claim"  # spelled as in SCRIPT, which refuses everyone else while it is held


class Hosts:
    """Hosts that are up: each has its own network and hostname; files, /dev/shm and process ids are the machine's.

    `exec` and `popen` enter the host's namespaces rather than use ssh: environment, working directory, exit code
    and signals reach the command as given, and a host whose sshd is dead or whose link is cut can still be used.
    What a user would meet over ssh is tested with exec(name, ["ssh", other, ...]). Over ssh, pkill and pgrep see
    the processes of their host only; inside `exec` they see, and kill, those of the whole machine.
    """

    def __init__(self, rows: list[dict]):
        self.names: list[str] = [row["name"] for row in rows]
        self._addresses = {row["name"]: row["address"] for row in rows}

    def address(self, name: str) -> str:
        return self._addresses[name]

    def exec(self, name: str, argv: list[str], **kw: Any) -> subprocess.CompletedProcess:
        """As subprocess.run; the output is captured as text unless `kw` says otherwise."""
        if not kw.keys() & {"stdout", "stderr", "capture_output"}:
            kw["capture_output"] = True
        return subprocess.run(_on_host(name, argv), **{"text": True, **kw})

    def popen(self, name: str, argv: list[str], **kw: Any) -> subprocess.Popen:
        """As subprocess.Popen, in text mode; its pid is the command's own."""
        return subprocess.Popen(_on_host(name, argv), **{"text": True, **kw})

    def pids(self, name: str) -> list[int]:
        """All that runs on a host apart from its sshd; ssh sessions count. Killing these is a host's crash."""
        return [int(pid) for pid in call("pids", name).stdout.split()]

    def link_down(self, name: str) -> None:
        """Pull the network cable of a host, which then reaches only itself."""
        call("link", name, "down")

    def link_up(self, name: str) -> None:
        call("link", name, "up")


def why_unavailable() -> str | None:
    """The reason why this machine cannot make hosts, or None; leaves nothing behind."""
    able = subprocess.run([*TESTCLUSTER, "check"], capture_output=True, text=True)
    if able.returncode:
        return able.stderr.strip()
    if shutil.which("pdsh") is None:
        return "pdsh is not installed (Debian package pdsh)"
    return None


@contextmanager
def claimed(wait_s: float = 600) -> Iterator[None]:
    """Hold the one set of hosts that a machine has; waits for another test session that uses it."""
    # An abstract socket: the kernel frees the name when this process dies, however it dies.
    with socket.socket(socket.AF_UNIX) as claim:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                claim.bind(CLAIM)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another test session has used the hosts for {wait_s} s") from None
                time.sleep(0.5)
        yield


def ready(num_hosts: int) -> Hosts:
    """`num_hosts` hosts that reach each other: those that are up where they do, else new ones. Needs the claim."""
    rows = status()
    if len(rows) != num_hosts or not all(row["reachable"] for row in rows):
        call("up", str(num_hosts), "--claimed")
        rows = status()
    return Hosts(rows)


def status() -> list[dict]:
    return json.loads(call("status", "--format", "json", ok=(0, 1)).stdout)["hosts"]


def call(*argv: str, ok: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess:
    done = subprocess.run([*TESTCLUSTER, *argv], capture_output=True, text=True)
    assert done.returncode in ok, f"testcluster {' '.join(argv)}: exit {done.returncode}: {done.stderr}"
    return done


def _on_host(name: str, argv: list[str]) -> list[str]:
    return [*TESTCLUSTER, "exec", name, "--", *argv]
