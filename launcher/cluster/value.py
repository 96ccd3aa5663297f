"""The Cluster value: hosts, their slots, and the accelerator; built from a hostfile, Slurm or this machine.

`resolve` is called once, when a plan is built; everything later reads the value.
Must never connect to a host (preflight does) and never guess a host the user did not name.
"""

from __future__ import annotations

import itertools
import socket
from dataclasses import dataclass
from pathlib import Path

from launcher import env
from launcher.cluster.filters import apply_filters
from launcher.cluster.hostfile import parse_hostfile
from launcher.cluster.slurm import slurm_hosts
from launcher.errors import Problem, UserError, raise_if
from launcher.schema import ClusterSection, LaunchSection

DEFAULT_CPU_PROCS = 2


@dataclass(frozen=True)
class Host:
    """One machine: name as DeepSpeed reaches it, ids of the slots used on it (one process each)."""

    name: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Cluster:
    """Hosts in rank order. `local`: started on this machine without SSH."""

    hosts: tuple[Host, ...]
    accelerator: str
    local: bool

    @property
    def world_size(self) -> int:
        """Data-parallel ranks: one per slot."""
        return sum(len(host.slots) for host in self.hosts)

    @property
    def slots_per_host(self) -> int | None:
        """Slots of each host when all have as many, else None."""
        counts = {len(host.slots) for host in self.hosts}
        return counts.pop() if len(counts) == 1 else None

    def rank_hosts(self) -> list[str]:
        """Host name of every global rank, in rank order."""
        return [host.name for host in self.hosts for _ in host.slots]


def resolve(section: ClusterSection, launch: LaunchSection | None = None) -> Cluster:
    """Cluster of the request; raises UserError for anything that does not name existing hosts and slots.

    A batch job that is still to be submitted (`launch`) has no hosts yet: placeholders stand for its nodes.
    """
    if section.accelerator not in ("auto", "cpu", "cuda"):
        raise UserError(
            Problem("cluster.accelerator", section.accelerator, "not an accelerator", "use auto, cpu or cuda")
        )
    if section.kind == "local":
        return _local(section)
    if section.kind == "hostfile":
        hosts = parse_hostfile(Path(section.hostfile or ""))
        source = f"cluster.hostfile={section.hostfile}"
    elif section.kind == "slurm" and launch is not None and launch.submit == "sbatch":
        hosts = _nodes_to_be(section, launch)
        source = "launch.nodes and launch.slots"
    elif section.kind == "slurm":
        hosts = slurm_hosts(env.slurm())
        source = "the Slurm allocation"
    else:
        raise UserError(
            Problem("cluster.kind", section.kind, "not a kind of cluster", "use cluster=local, hostfile or slurm")
        )
    if section.num_procs is not None:
        raise UserError(
            Problem(
                "cluster.num_procs",
                str(section.num_procs),
                f"it counts processes of this machine; with {source} the slots decide",
                "remove it, or choose slots with cluster.include / cluster.exclude",
            )
        )
    chosen = apply_filters(hosts, section.include, section.exclude)
    accelerator = section.accelerator if section.accelerator != "auto" else _detect_accelerator()
    visible = env.visible_devices()
    if section.kind == "hostfile" and accelerator == "cuda" and visible is not None:
        why = "it is of this shell alone and says nothing about other hosts: DeepSpeed would apply it to some"
        fix = "unset it, and choose GPUs with cluster.include=HOST:0,1@HOST:2,3"
        raise UserError(Problem("CUDA_VISIBLE_DEVICES", visible, why, fix))
    return Cluster(tuple(Host(name, slots) for name, slots in chosen.items()), accelerator, local=False)


def _nodes_to_be(section: ClusterSection, launch: LaunchSection) -> dict[str, tuple[int, ...]]:
    problems = [
        Problem(
            f"launch.{name}", str(value), "a batch job asks Slurm for it", f"give launch.{name} a number, 1 or more"
        )
        for name, value in (("nodes", launch.nodes), ("slots", launch.slots))
        if value is None or value < 1
    ]
    if section.accelerator == "auto":
        why = "the nodes of a batch job are not known yet, so nobody can look"
        problems.append(Problem("cluster.accelerator", "auto", why, "use cluster.accelerator=cuda or cpu"))
    raise_if(problems)
    assert launch.nodes is not None and launch.slots is not None
    return {f"node{number}": tuple(range(launch.slots)) for number in range(launch.nodes)}


def _local(section: ClusterSection) -> Cluster:
    problems = [
        Problem(f"cluster.{name}", str(value), "it only applies to several hosts", "remove it or use cluster=hostfile")
        for name, value in (
            ("hostfile", section.hostfile),
            ("include", section.include),
            ("exclude", section.exclude),
            ("master_addr", section.master_addr),
            ("launcher_args", section.launcher_args),
            ("ssh_port", section.ssh_port),
        )
        if value is not None
    ]
    if section.num_procs is not None and section.num_procs < 1:
        problems.append(Problem("cluster.num_procs", str(section.num_procs), "a run needs a process", "use 1 or more"))
    if problems:
        raise UserError(*problems)
    accelerator = section.accelerator if section.accelerator != "auto" else _detect_accelerator()
    slots = tuple(range(section.num_procs or DEFAULT_CPU_PROCS))
    if accelerator == "cuda":
        slots = _local_gpus(section.num_procs)
    return Cluster((Host(socket.gethostname(), slots),), accelerator, local=True)


def _local_gpus(num_procs: int | None) -> tuple[int, ...]:
    visible = env.visible_devices()
    if visible is None:
        devices = tuple(range(count_gpus()))
    else:
        try:
            numbers = [int(part) for part in visible.split(",") if part.strip()]
        except ValueError:
            raise UserError(
                Problem(
                    "CUDA_VISIBLE_DEVICES",
                    visible,
                    "DeepSpeed's launcher reads it as a list of integers and fails on UUIDs",
                    "name the cards by index, for example CUDA_VISIBLE_DEVICES=0,1",
                )
            ) from None
        # As the CUDA driver reads it: the list ends before the first negative id, so -1 hides every card.
        devices = tuple(itertools.takewhile(lambda number: number >= 0, numbers))
    wanted = num_procs if num_procs is not None else len(devices)
    if not devices or wanted > len(devices):
        raise UserError(
            Problem(
                "cluster.num_procs",
                str(num_procs),
                f"{len(devices)} GPUs are usable here (CUDA_VISIBLE_DEVICES={visible})",
                "ask for as many as there are, or use cluster.accelerator=cpu",
            )
        )
    return devices[:wanted]


def _detect_accelerator() -> str:
    requested = env.requested_accelerator()
    if requested in ("cpu", "cuda"):
        return requested
    return "cuda" if count_gpus() > 0 else "cpu"


def count_gpus() -> int:
    """NVIDIA GPUs this process may open, without importing torch: the driver's device files."""
    return sum(1 for node in Path("/dev").glob("nvidia[0-9]*") if node.name[6:].isdecimal())
