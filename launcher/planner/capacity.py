"""What a rank may use of its device and of its host, and by how much a planned peak misses it.

Called before a run, by `choose` and by the tables of mode=plan. Pure: what the machine has is handed in.
Must never guess: where nobody said how much memory there is, there is no capacity and nothing is judged.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.cluster.value import Cluster
from launcher.planner.hardware import read
from launcher.planner.prediction import Memory
from launcher.schema import RunConfig

GB = 1e9
# The CUDA context, cuBLAS workspaces and NCCL's channels of a process: none of it is torch's. A usual figure, which
# recipe=profile replaces by what it measures.
CONTEXT_BYTES = 800_000_000
# Host memory of a rank that is no tensor's: Python, torch, DeepSpeed and what they allocate. Measured as RssAnon with
# model=tiny on a CPU: 0.41 GB, and 0.33 for the two launchers of a host. Kept back where memory is a share of a host's.
PROCESS_BYTES = 500_000_000
# Of what is left, what torch's allocator holds and cannot hand out in one piece when the peak comes.
FRAGMENTATION = 0.10
BUCKETS = "reduce buckets"  # the term's name in a moment


@dataclass(frozen=True)
class Machine:
    """What the machine that launches has, in bytes; None where it does not say."""

    host_bytes: int | None
    device_bytes: int | None
    """The smallest of its GPUs."""


@dataclass(frozen=True)
class Capacity:
    """What a rank may use. On a CPU the device's memory is its share of the host's, and `host_bytes` is None."""

    device_bytes: int
    """After `reserve_bytes` is left out."""
    reserve_bytes: int
    """Context and fragmentation on CUDA; the process itself in a share of this machine's memory, else nothing."""
    host_bytes: int | None
    """Share of a rank in its host's memory, beside a GPU, without the process; None where it is not known."""
    one_memory: bool
    """Whether device and host are the same memory."""
    source: str
    """Who said so."""
    written_only: bool = False
    """Whether memory that is allocated and never written takes none, as in a host's own: buckets do not count there."""


def capacity_of(config: RunConfig, cluster: Cluster, machine: Machine) -> Capacity | None:
    """The capacity of a rank of `cluster`: plan.memory_bytes, else that of hardware=..., else the `machine`'s own.

    The machine's where every rank is on it.
    """
    ranks = max(len(host.slots) for host in cluster.hosts)
    share = machine.host_bytes // ranks if machine.host_bytes is not None and cluster.local else None
    left = None if share is None else max(0, share - PROCESS_BYTES)
    on_cuda, total, source = cluster.accelerator == "cuda", config.plan.memory_bytes, "plan.memory_bytes"
    hardware = read(config.hardware)
    if total is None:
        total, source = hardware.memory_bytes, f"hardware={config.hardware.name}"
    own = total is None and not on_cuda
    if total is None and cluster.local:
        total = machine.device_bytes if on_cuda else share
        source = "this machine's GPU" if on_cuda else f"this machine's memory / {ranks} ranks"
    if total is None:
        return None
    context = CONTEXT_BYTES if hardware.context_bytes is None else hardware.context_bytes
    fragmented = FRAGMENTATION if hardware.fragmentation is None else hardware.fragmentation
    if on_cuda:
        usable = round(max(0, total - context) * (1 - fragmented))
        return Capacity(usable, total - usable, left, False, source)
    usable = max(0, total - PROCESS_BYTES) if own else total
    return Capacity(usable, total - usable, None, True, source, own)


def needed(memory: Memory, capacity: Capacity) -> dict[str, tuple[int, int]]:
    """{device or host: (bytes a rank needs there, bytes it may use)}."""
    peak = memory.peak.total_bytes
    if capacity.written_only:  # a bucket of 2 GB is written as far as a small model's gradients reach
        peak = max(moment.total_bytes - moment.terms.get(BUCKETS, 0) for moment in memory.moments)
    if capacity.one_memory:
        return {"memory": (peak + memory.host_bytes, capacity.device_bytes)}
    found = {"device": (peak, capacity.device_bytes)}
    if capacity.host_bytes is not None:
        found["host"] = (memory.host_bytes, capacity.host_bytes)
    return found


def missing(memory: Memory, capacity: Capacity) -> dict[str, int]:
    """{device or host: bytes that a rank lacks there}; empty: it fits."""
    return {where: wants - has for where, (wants, has) in needed(memory, capacity).items() if wants > has}


def told(lacking: dict[str, int]) -> str:
    """By how much it does not fit, in GB."""
    return " and ".join(f"{size / GB:,.2f} GB too much for the {where}" for where, size in lacking.items())
