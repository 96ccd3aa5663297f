"""Plan -> argument lists: the stock `deepspeed` launcher, and single local processes of ours.

Called by `launcher.run` and shown by `mode=plan`. Pure; executes nothing.
Must never put anything but the plan file's path behind the script: a remote shell would expand it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.cluster.filters import spec
from launcher.plan import Plan
from launcher.rundir import RunDir

ROOT = Path(__file__).resolve().parent.parent
BUILD_OPERATORS = ROOT / "scripts" / "build_ops.py"
WORKER = ROOT / "recipes" / "worker.py"


def deepspeed_command(plan: Plan, run: RunDir, master_port: int, master_addr: str | None) -> list[str]:
    """argv of the `deepspeed` front-end for this plan; `master_addr` is needed for several hosts only."""
    cluster, section = plan.cluster, plan.config.cluster
    argv = [str(Path(sys.executable).parent / "deepspeed"), "--no_local_rank", "--master_port", str(master_port)]
    if cluster.local:
        if cluster.accelerator == "cuda":
            argv += ["--include", "localhost:" + ",".join(map(str, cluster.hosts[0].slots))]
        else:
            argv += ["--num_gpus", str(cluster.world_size)]
        return [*argv, str(WORKER), str(run.plan)]
    argv += ["--hostfile", str(run.hostfile), "--force_multi", "--launcher", section.launcher]
    argv += ["--no_ssh_check"]
    if master_addr:
        argv += ["--master_addr", master_addr]
    # The MPI runners take no filter; the run's hostfile names just the chosen hosts (and rules.py their first slots).
    if (section.include or section.exclude) and section.launcher in ("pdsh", "slurm"):
        argv += ["--include", spec({host.name: host.slots for host in cluster.hosts})]
    if section.ssh_port:
        argv += ["--ssh_port", str(section.ssh_port)]
    if section.launcher_args:
        argv += [f"--launcher_args={section.launcher_args}"]  # one word: the value may begin with a dash
    return [*argv, str(WORKER), str(run.plan)]


def operators_command(plan: Plan) -> list[str]:
    """argv that compiles, if they are missing on this machine, the DeepSpeed operators this plan loads."""
    return [sys.executable, str(BUILD_OPERATORS), "--only", *needed_operators(plan)]


def needed_operators(plan: Plan) -> list[str]:
    """DeepSpeed's builder names of the compiled operators this plan loads, in the order they are loaded."""
    needed = ["ShareMemComm"] if plan.cluster.accelerator == "cpu" else []
    optimizer = plan.deepspeed.get("optimizer", {})
    kind, offloaded = str(optimizer.get("type", "")).lower(), plan.offload_device("optimizer") is not None
    if kind in ("adam", "adamw") and not optimizer.get("params", {}).get("torch_adam"):
        needed.append("CPUAdam" if offloaded else "FusedAdam")
    if offloaded and kind in ("lion", "adagrad"):
        needed.append(f"CPU{kind.capitalize()}")
    if "nvme" in (plan.offload_device("optimizer"), plan.offload_device("param")):
        needed.append("AsyncIO")
    return needed


def hostfile_text(plan: Plan) -> str:
    """The hostfile the front-end reads: every host of the plan with enough slots for its highest id."""
    return "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in plan.cluster.hosts)


def local_worker_command(*arguments: str) -> list[str]:
    """argv of one process of ours on this machine, without DeepSpeed's launcher (prepare, profile, export)."""
    return [sys.executable, str(WORKER), *arguments]
