"""The main job across a hostfile, over real SSH, with pdsh and Open MPI, on two hosts: the losses of one machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.train.running import ROOT, SMALL, launch, losses

pytestmark = pytest.mark.cluster
OPTIONS = ("zero=stage3", "offload=cpu", "run.steps=6", "checkpoint.every=3")


ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # sums over threads would differ in the last bit
RUNNERS = {
    "pdsh": [],
    # mpirun refuses root, and looks for the first interface that is not eth0
    "openmpi": ["cluster.launcher_args='--allow-run-as-root --mca oob_tcp_if_include eth0'"],
}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one machine."""
    run = tmp_path_factory.mktemp("local") / "run"
    done = launch(*SMALL, *OPTIONS, f"run.dir={run}", env=ONE_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.mark.parametrize("runner", RUNNERS)
def test_two_hosts_have_the_losses_of_one_machine(two_hosts: Hosts, local: Path, tmp_path: Path, runner: str) -> None:
    if runner == "openmpi" and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian package openmpi-bin)")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in two_hosts.names))
    options = [option for option in SMALL if not option.startswith("cluster.num_procs")]
    remote = tmp_path / "remote run"
    across = two_hosts.exec(
        two_hosts.names[0],
        [
            *(sys.executable, str(ROOT / "launch.py"), "cluster=hostfile", f"cluster.hostfile={hostfile}"),
            *(f"cluster.launcher={runner}", *RUNNERS[runner], *options, *OPTIONS, f"run.dir='{remote}'"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env=ONE_THREAD,
    )
    assert across.returncode == 0, across.stdout + across.stderr
    assert losses(remote) == losses(local)
    assert sorted(path.name for path in (remote / "logs").glob("*.rank*.log")) == [
        f"{name}.rank{rank}.log" for rank, name in enumerate(two_hosts.names)
    ]
    hosts = [json.loads((remote / "control" / f"pid.rank{rank}.json").read_text())["host"] for rank in (0, 1)]
    assert hosts == two_hosts.names
    assert (remote / "checkpoints" / "latest").read_text() == "step_00000006"
