"""`mode=check` over real SSH: two healthy hosts pass, and each thing that is wrong on the second is told of by name.

Run by pytest. What is wrong is mounted over the second host's files, inside its own mount namespace.
Must never change a file of this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Hosts
from tests.train.running import ROOT, SMALL

pytestmark = pytest.mark.cluster
OPTIONS = [option for option in SMALL if not option.startswith("cluster.num_procs")]


def check(hosts: Hosts, folder: Path, *overrides: str) -> tuple[int, Any]:
    """Exit code and answer of mode=check from the first host."""
    hostfile = folder / "hosts"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in hosts.names))
    argv = [sys.executable, str(ROOT / "launch.py"), "mode=check", "check.format=json", "cluster=hostfile"]
    more = [f"cluster.hostfile={hostfile}", f"run.root={folder / 'runs'}", *overrides]
    done = hosts.exec(hosts.names[0], [*argv, *OPTIONS, *more])
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def on(hosts: Hosts, name: str, *argv: str) -> None:
    """Runs a command on a host over ssh: in the mount namespace in which its sessions live."""
    hosts.exec(hosts.names[0], ["ssh", name, *argv], check=True)


def failures(answer: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for finding in answer["findings"]:
        if finding["status"] == "fail":
            found.setdefault(finding["host"], []).append(finding["check"])
    return found


def test_healthy_hosts_pass_and_the_collective_is_measured(two_hosts: Hosts, tmp_path: Path) -> None:
    code, answer = check(two_hosts, tmp_path)
    assert (code, failures(answer)) == (0, {}), answer
    assert answer["measured"]["all_reduce"]["ranks"] == 2 and answer["measured"]["all_reduce"]["gb_per_s"] > 0
    [pair] = answer["measured"]["pairs"]
    assert pair["hosts"] == two_hosts.names and pair["gb_per_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


def test_another_torch_and_a_full_disk_are_found_by_name(two_hosts: Hosts, tmp_path: Path) -> None:
    second = two_hosts.names[1]
    installed = metadata.distribution("torch")._path / "METADATA"  # type: ignore[attr-defined]
    older = tmp_path / "METADATA"
    older.write_text(installed.read_text().replace(f"Version: {metadata.version('torch')}", "Version: 2.7.0", 1))
    scratch = tmp_path / "nvme"
    scratch.mkdir()
    nvme = ("zero=stage3", "offload=nvme", f"deepspeed.zero_optimization.offload_optimizer.nvme_path={scratch}")
    mounted = []
    try:
        on(two_hosts, second, "mount", "--bind", str(older), str(installed))
        mounted.append(str(installed))
        on(two_hosts, second, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(scratch))
        mounted.append(str(scratch))
        code, answer = check(two_hosts, tmp_path, *nvme)
    finally:
        for path in mounted:
            on(two_hosts, second, "umount", path)
    assert code == 4
    assert failures(answer) == {second: ["versions", "folders"]}
    got = {finding["check"]: finding["got"] for finding in answer["findings"] if finding["status"] == "fail"}
    assert got["versions"].startswith("torch 2.7.0 (here ") and got["folders"].startswith(f"{scratch}: 0.0 GB free of")


def test_a_launch_on_a_bad_host_starts_nothing(two_hosts: Hosts, tmp_path: Path) -> None:
    run, hostfile = tmp_path / "run", tmp_path / "hosts"
    hostfile.write_text(f"{two_hosts.names[0]} slots=1\nno-such-host slots=1\n")
    argv = [sys.executable, str(ROOT / "launch.py"), "cluster=hostfile", f"cluster.hostfile={hostfile}"]
    done: subprocess.CompletedProcess[str] = two_hosts.exec(two_hosts.names[0], [*argv, *OPTIONS, f"run.dir={run}"])
    assert done.returncode == 4, done.stderr
    assert "no-such-host: reachable" in done.stderr and "its name has no address here" in done.stderr
    assert not run.exists()
