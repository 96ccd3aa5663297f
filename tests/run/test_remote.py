"""Scripts on many hosts at once, with a stand-in `ssh` that runs what it is given on this machine.

Run by pytest. Real ssh between two hosts is in tests/cluster.
Must never need more than this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLD_TORCH = """import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: "2.7.0" if name == "torch" else version(name)
"""
STAND_IN = """#!/bin/sh
# ssh [-o X | -p N]... HOST COMMAND: bad hosts misbehave, the others run COMMAND in a shell, as sshd would
while [ "${1#-}" != "$1" ]; do shift 2; done
host=$1; shift
case $host in
denied*) echo "root@$host: Permission denied (publickey,password)." >&2; exit 255 ;;
silent*) exec sleep 60 ;;
chatty*) echo "Welcome to $host"; echo "a motd" >&2 ;;
old*) PYTHONPATH=$OLD_PYTHON exec sh -c "$1" ;;
esac
exec sh -c "$1"
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """check(hosts, *overrides) -> (exit code, the JSON of mode=check)."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(STAND_IN)
    ssh.chmod(0o755)

    def run(hosts: list[str], *overrides: str, **env: str) -> tuple[int, Any]:
        hostfile = tmp_path / "hosts"
        hostfile.write_text("".join(f"{host} slots=1\n" for host in hosts))
        done = subprocess.run(
            [
                *(sys.executable, str(ROOT / "launch.py"), "mode=check", "check.format=json", "check.collective=false"),
                *("cluster=hostfile", f"cluster.hostfile={hostfile}", "cluster.accelerator=cpu", "zero=stage2"),
                *("cluster.master_addr=127.0.0.1", f"run.root={tmp_path / 'runs'}", *overrides),
            ],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"} | env,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    return run


def failures(answer: Any) -> dict[str, list[str]]:
    """{host: failed checks}, without what this machine as 256 hosts cannot have."""
    found: dict[str, list[str]] = {}
    for finding in answer["findings"]:
        if finding["status"] == "fail" and finding["check"] not in ("own_name", "own_machine", "limits", "operators"):
            found.setdefault(finding["host"], []).append(finding["check"])
    return found


def test_every_bad_host_is_named_and_the_good_ones_pass(check: Any, tmp_path: Path) -> None:
    hosts = ["good1", "denied1", "silent1", "chatty1", "old1", "good2"]
    (tmp_path / "bin" / "sitecustomize.py").write_text(OLD_TORCH)
    code, answer = check(hosts, "check.timeout_s=6", OLD_PYTHON=str(tmp_path / "bin"))
    assert code == 4 and answer["ok"] is False
    found = failures(answer)
    assert found.pop("denied1") == ["reachable"] and found.pop("silent1") == ["reachable"]
    assert found.pop("old1") == ["versions"]
    assert found == {}
    [torch] = [f["got"] for f in answer["findings"] if (f["host"], f["check"]) == ("old1", "versions")]
    assert torch.startswith("torch 2.7.0 (here ")
    said = {finding["host"]: finding["got"] for finding in answer["findings"] if finding["check"] == "reachable"}
    assert said["denied1"].endswith("Permission denied (publickey,password).")
    assert said["silent1"] == "timed out after 6 s"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "hosts"]


def test_256_hosts_are_looked_at_in_a_few_seconds(check: Any) -> None:
    started = time.monotonic()
    _, answer = check([f"node{number}" for number in range(256)], "check.timeout_s=60")
    assert failures(answer) == {}
    assert len({finding["host"] for finding in answer["findings"]}) == 256
    assert time.monotonic() - started < 60  # the figure, under 20 s when idle, is in docs/numbers.md
