"""SLURM_* variables of an allocation -> host names and slot ids.

Called by `launcher.cluster.value` for cluster=slurm.
Must never start a job or ask Slurm's daemons: the variables of the allocation say everything.
"""

from __future__ import annotations

import re

from launcher.errors import Problem, UserError


def slurm_hosts(variables: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """{host: slots} of the allocation: GPUs per node when it has any, else tasks per node."""
    nodelist = variables.get("SLURM_JOB_NODELIST") or variables.get("SLURM_NODELIST")
    if not nodelist:
        raise UserError(
            Problem(
                "cluster",
                "slurm",
                "this shell is not inside a Slurm allocation (SLURM_JOB_NODELIST is not set)",
                "run it under salloc or in an sbatch script, or use cluster=hostfile",
            )
        )
    hosts = expand_nodelist(nodelist)
    gpus = variables.get("SLURM_GPUS_ON_NODE") or variables.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    tasks = _repeat(variables.get("SLURM_TASKS_PER_NODE", "1"))
    counts = [int(gpus)] * len(hosts) if gpus.isdecimal() and int(gpus) else tasks
    if len(counts) != len(hosts):
        raise UserError(
            Problem(
                "SLURM_TASKS_PER_NODE",
                variables.get("SLURM_TASKS_PER_NODE", ""),
                f"it counts {len(counts)} nodes, the allocation has {len(hosts)}",
                "start again inside a fresh allocation",
            )
        )
    return {host: tuple(range(count)) for host, count in zip(hosts, counts, strict=True)}


def expand_nodelist(text: str) -> list[str]:
    """`a[01-03,7],b` -> [a01, a02, a03, a7, b]; several brackets in a name are allowed."""
    names: list[str] = []
    for term in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names += _expand_term(term.strip())
    return names


def _expand_term(term: str) -> list[str]:
    match = re.match(r"^([^\[]*)\[([^\]]*)\](.*)$", term)
    if match is None:
        return [term]
    numbers: list[str] = []
    for part in match[2].split(","):
        low, dash, high = part.partition("-")
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)] if dash else [part]
    return [match[1] + number + tail for number in numbers for tail in _expand_term(match[3])]


def _repeat(text: str) -> list[int]:
    """`2(x3),1` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.match(r"^(\d+)(?:\(x(\d+)\))?$", part.strip())
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    return counts
