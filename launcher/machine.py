"""This machine's memory, and that of its smallest GPU, as the operating system and the driver say.

Called by `launcher.cli` once a plan has to be judged. Asks nvidia-smi as the probe does, where the ranks are on GPUs.
Must never be part of a plan: the same request gives the same plan on any machine.
"""

from __future__ import annotations

from pathlib import Path

from launcher.cluster.value import Cluster
from launcher.planner.capacity import Machine

MIB = 2**20
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


def gpu_bytes(slots: tuple[int, ...]) -> int | None:
    """Memory of the smallest of the GPUs `slots`; None where the driver does not say."""
    from launcher.onhost import probe

    try:
        sizes = {int(index): int(total) * MIB for index, total in probe.table("gpu=index,memory.total")}
    except Exception:  # no nvidia-smi, one that fails, answers late or says [N/A]: then it is not known
        return None
    return min((sizes[slot] for slot in slots if slot in sizes), default=None)
