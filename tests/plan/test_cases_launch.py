"""Requests from public threads about launching, as far as they are decided before a process is started.

Run by pytest; a test names its thread. What only real hosts show is in tests/cluster.
Must never reach a host.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import env
from launcher.cluster import value
from launcher.cluster.value import resolve
from launcher.command import WORKER, deepspeed_command
from launcher.errors import UserError
from launcher.rendezvous import free_port, master_address
from launcher.rundir import RunDir
from tests.plan.asking import ROOT, composed, planned

RUN = RunDir("/shared/runs/a")


@pytest.mark.parametrize("card", ["0", "1"])
def test_the_card_of_this_shell_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch, card: str) -> None:
    """tdrussell/diffusion-pipe#273: with a count DeepSpeed ignores the variable, and two jobs met on GPU 0."""
    monkeypatch.setattr(env, "visible_devices", lambda: card)
    monkeypatch.setattr(value, "count_gpus", lambda: 2)
    cluster = resolve(dataclasses.replace(composed("zero=stage2").cluster, accelerator="cuda", num_procs=1))
    assert cluster.hosts[0].slots == (int(card),)
    plan = dataclasses.replace(planned("zero=stage2"), cluster=cluster)
    argv = deepspeed_command(plan, RUN, 29500, None)
    assert argv[argv.index("--include") + 1] == f"localhost:{card}"


def test_two_jobs_of_one_host_do_not_share_a_port() -> None:
    with socket.socket() as taken:
        taken.bind(("", free_port()))
        assert free_port() != taken.getsockname()[1]


def test_cards_of_this_shell_mean_nothing_on_other_hosts(
    monkeypatch: pytest.MonkeyPatch, two_hosts: tuple[str, ...]
) -> None:
    """deepspeedai/DeepSpeed#662."""
    monkeypatch.setattr(env, "visible_devices", lambda: "0,1")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
        planned(*two_hosts, "zero=stage2")


@pytest.mark.parametrize(
    "override",
    [
        "run.name='first try'",  # deepspeedai/DeepSpeed#4265
        "+data.note='{lr:1e-4,wd:0.1}'",  # deepspeedai/DeepSpeed#267
        "+data.note='run$HOME'",  # Lightning-AI/pytorch-lightning#18145
        "+data.note='a;b|c&d`e`(f) *'",
    ],
)
def test_no_value_of_an_override_is_on_the_command_line(two_hosts: tuple[str, ...], override: str) -> None:
    """What is behind the script is the path of the plan, and no option before it comes from an override."""
    argv = deepspeed_command(planned(*two_hosts, "zero=stage2", override), RUN, 29500, "10.0.0.1")
    assert argv[-2:] == [str(WORKER), str(RUN.plan)]
    assert argv == deepspeed_command(planned(*two_hosts, "zero=stage2"), RUN, 29500, "10.0.0.1")


def test_no_script_of_the_users_runs_before_ours(two_hosts: tuple[str, ...]) -> None:
    """deepspeedai/DeepSpeed#7469: the command that activates an environment swallowed the one behind it."""
    argv = deepspeed_command(planned(*two_hosts, "zero=stage2"), RUN, 29500, "10.0.0.1")
    assert not [word for word in argv if "venv_script" in word]
    assert Path(argv[0]).parent == Path(sys.executable).parent


def test_pythonpath_of_a_host_is_kept_behind_the_plans(tmp_path: Path) -> None:
    """huggingface/accelerate#514: the launcher replaced it."""
    script = (
        "import json, os, sys, types; sys.path.insert(0, sys.argv[1]); from recipes import worker;"
        "from launcher.rundir import RunDir;"
        "plan = types.SimpleNamespace(env={'PYTHONPATH': '/mine:/also'}, cluster=types.SimpleNamespace(local=False));"
        "worker._take_environment(plan, RunDir('/nowhere'), 0);"
        "print(json.dumps([os.environ['PYTHONPATH'], sys.path[1:3]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT)],
        env={"PYTHONPATH": "/theirs", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == ["/mine:/also:/theirs", ["/mine", "/also"]]


def test_a_first_host_without_an_address_is_asked_for_one(
    monkeypatch: pytest.MonkeyPatch, two_hosts: tuple[str, ...]
) -> None:
    """deepspeedai/DeepSpeed#6497: DeepSpeed asks `hostname -I`, which not every system has."""

    def unknown(*args: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError) as caught:
        master_address(planned(*two_hosts, "zero=stage2"))
    [problem] = caught.value.problems
    assert problem.where == "cluster.master_addr" and "alpha" in problem.why and "Name or service" in problem.why
    given = planned(*two_hosts, "zero=stage2", "cluster.master_addr=10.1.2.3")
    assert master_address(given) == "10.1.2.3"
