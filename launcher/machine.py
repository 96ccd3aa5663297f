"""This machine's memory, and that of its smallest GPU, as the operating system and the driver say.

Called by `launcher.cli` once a plan has to be judged. Asks nvidia-smi as the probe does, where the ranks are on GPUs.
Must never be part of a plan: the same request gives the same plan on any machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from launcher.cluster.value import Cluster
from launcher.planner.capacity import Machine

MIB = 2**20
CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup/memory.max")  # a container's own limit


def this_machine(cluster: Cluster) -> Machine:
    """What is here for the ranks of `cluster` that run on this machine; nothing where they run elsewhere."""
    if not cluster.local:
        return Machine(None, None)
    return Machine(host_bytes(), gpu_bytes(cluster.hosts[0].slots) if cluster.accelerator == "cuda" else None)


def host_bytes() -> int | None:
    """Memory of this machine, or of the container that this process is in."""
    found = []
    try:
        lines = MEMINFO.read_text().splitlines()
        found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
        found += [int(CGROUP.read_text())] if CGROUP.is_file() else []
    except (OSError, ValueError):  # "max": no limit
        pass
    return min(found, default=None)


def device_name(cluster: Cluster) -> str | None:
    """What the ranks of a local `cluster` run on: the name of its GPUs, or that of the CPU with its cores and ranks.

    None where nobody says, or where GPUs differ. What a rank on a CPU can do depends on how many share it.
    """
    ranks = len(cluster.hosts[0].slots)
    try:
        if cluster.accelerator == "cuda":
            from launcher.onhost import probe

            names = {int(index): name for index, name in probe.table("gpu=index,name")}
            found = {names[slot] for slot in cluster.hosts[0].slots}
            return found.pop() if len(found) == 1 else None
        lines = CPUINFO.read_text().splitlines()
    except Exception:  # as for its memory
        return None
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return None if name is None else f"{name}, {os.cpu_count()} cores for {ranks} ranks"


def gpu_bytes(slots: tuple[int, ...]) -> int | None:
    """Memory of the smallest of the GPUs `slots`; None where the driver does not say."""
    from launcher.onhost import probe

    try:
        sizes = {int(index): int(total) * MIB for index, total in probe.table("gpu=index,memory.total")}
    except Exception:  # no nvidia-smi, one that fails, answers late or says [N/A]: then it is not known
        return None
    return min((sizes[slot] for slot in slots if slot in sizes), default=None)
