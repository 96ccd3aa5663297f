"""Plan -> argument lists: the stock `deepspeed` launcher, and single local processes of ours.

Called by `launcher.run` and shown by `mode=plan`. Pure; executes nothing.
Must never put anything but the plan file's path behind the script: a remote shell would expand it.
"""

from __future__ import annotations

import shlex
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


def batch_script(plan: Plan, run: RunDir, overrides: list[str], folder: str) -> str:
    """Slurm batch script that starts the run, or continues it once it has a checkpoint, and queues again when stopped.

    Slurm sends SIGTERM to the script `watch.grace_s` before the time limit and on preemption; the launcher writes a
    checkpoint and leaves with 143.
    """
    launch = plan.config.launch
    assert launch.nodes is not None and launch.slots is not None
    per_node = [f"--gpus-per-node={launch.slots}"] if plan.cluster.accelerator == "cuda" else []
    options = [
        f"--job-name={run.path.name}",
        f"--nodes={launch.nodes}",
        f"--ntasks-per-node={launch.slots}",
        *per_node,
        f"--output={run.path}.slurm-%j.log",
        "--requeue",
        "--open-mode=append",
        f"--signal=B:TERM@{round(plan.config.watch.grace_s)}",
        *launch.sbatch,
    ]
    kept = [text for text in overrides if not text.lstrip("+").startswith(("launch.", "run.dir=", "run.name="))]
    where = "run.dir='{}'".format(str(run.path).replace("\\", "\\\\").replace("'", "\\'"))
    command = [sys.executable, str(ROOT / "launch.py")]
    again = [*command, "recipe=resume", where, "cluster=slurm", "launch.submit=none"]
    path = shlex.quote(str(run.path))
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {shlex.quote(option)}" for option in options),
            f"cd {shlex.quote(folder)} || exit 2",
            f"run={path}",
            'if [ -e "$run/checkpoints/latest" ]; then',
            f"    {shlex.join(again)} &",
            "else",
            '    [ ! -e "$run" ] || mv "$run" "$run.without-checkpoint-$(date +%s)"',
            f"    {shlex.join([*command, *kept, where])} &",
            "fi",
            "launcher=$!",
            "trap 'kill -TERM $launcher' TERM",
            'wait "$launcher"; code=$?',
            'while kill -0 "$launcher" 2>/dev/null; do wait "$launcher"; code=$?; done',
            '[ "$code" -ne 143 ] || scontrol requeue "$SLURM_JOB_ID"',
            'exit "$code"',
            "",
        ]
    )


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
