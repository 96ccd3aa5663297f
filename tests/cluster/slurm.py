"""A real Slurm on this machine: munged, slurmctld and slurmd of Debian's packages, one node, in a folder of its own.

Called by tests/cluster/test_slurm.py. Everything it starts it ends, by process id.
Must never touch a Slurm that is already configured here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")


def why_unavailable() -> str | None:
    """Why no Slurm can be started here, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian packages slurm-wlm and munge)"
    if os.getuid() != 0:
        return "starting Slurm's daemons needs root"
    return None


@contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """Environment in which sbatch and srun reach a Slurm of one node with two CPUs, as long as the block runs."""
    host = socket.gethostname()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(
        "\n".join(
            [
                "ClusterName=here",
                f"SlurmctldHost={host}(127.0.0.1)",
                f"SlurmctldPort={_free_port()}",
                f"SlurmdPort={_free_port()}",
                "SlurmUser=root",
                "SlurmdUser=root",
                f"StateSaveLocation={folder / 'state'}",
                f"SlurmdSpoolDir={folder / 'spool'}",
                f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
                f"SlurmdPidFile={folder / 'slurmd.pid'}",
                f"AuthInfo=socket={folder / 'munge.socket'}",
                "AuthType=auth/munge",
                "CredType=cred/munge",
                "ProctrackType=proctrack/linuxproc",
                "TaskPlugin=task/none",
                "SelectType=select/cons_tres",
                "SelectTypeParameters=CR_CPU",
                "MpiDefault=none",
                "ReturnToService=2",
                "JobRequeue=1",
                "MinJobAge=3600",
                "KillWait=5",
                f"NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN",
                f"PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES",
                "",
            ]
        )
    )
    env = os.environ | {"SLURM_CONF": str(conf), "PATH": _path()}
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder / 'munge.socket'}"]
        + [
            f"--pid-file={folder / 'munged.pid'}",
            f"--log-file={folder / 'munged.log'}",
            f"--seed-file={folder / 'seed'}",
        ],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D"],
    ]
    daemons = []
    try:
        for argv in commands:
            log = (folder / f"{argv[0]}.out").open("wb")
            daemons.append(subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=folder))
            time.sleep(0.5)
        _wait_for_node(env, folder)
        yield env
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):  # a job would outlive the daemons
            subprocess.run(["scancel", "--me", "--signal=KILL", "--full"], env=env, timeout=10, check=False)
            time.sleep(1)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _wait_for_node(env: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        seen = subprocess.run(["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, check=False)
        if seen.stdout.strip() == "idle":
            return
        time.sleep(0.3)
    logs = "\n".join(f"{log.name}:\n{log.read_text()[-1500:]}" for log in folder.glob("*.out"))
    raise AssertionError(f"no idle node after 30 s: {seen.stdout}{seen.stderr}\n{logs}")


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
