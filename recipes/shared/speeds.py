"""How fast this hardware is, by the names of hardware.file: arithmetic, memory, host and device, links between ranks.

Used by `recipes.profile`, before there is a model. All ranks measure at once, as they will train at once.
Must never take longer than seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from launcher.plan import Plan
from recipes.check import all_reduce, best
from recipes.shared.distributed import Ranks

SIDE = {"cuda": 8192, "cpu": 1024}  # of the square matrices that are multiplied
COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def measured(plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Numbers of the slowest rank, in bytes and operations a second, and what they were measured on. All ranks."""
    device = ranks.device
    found: dict[str, Any] = {"device": _name(device), "ranks_per_host": max(len(h.slots) for h in plan.cluster.hosts)}
    for name, dtype in TYPES.items():
        found[f"{name}_flops_per_s"] = _flops(dtype, ranks)
    found["memory_bytes_per_s"] = 2 * _copied(device, device, ranks)
    host = torch.device("cpu")
    at_once = min(len(each.slots) for each in plan.cluster.hosts)  # ranks that share a host's memory while they copy
    found["host_memory_bytes_per_s"] = 2 * at_once * _copied(host, host, ranks)
    if device.type == "cuda":
        found["pcie_bytes_per_s"] = min(_copied(host, device, ranks), _copied(device, host, ranks))
        found["memory_bytes"] = int(torch.cuda.get_device_properties(device).total_memory)
        torch.cuda.empty_cache()
    else:
        found["pcie_bytes_per_s"] = found["memory_bytes_per_s"] / 2  # device and host are one memory
    return found | _links(plan, ranks)


def _flops(dtype: torch.dtype, ranks: Ranks) -> float:
    side = SIDE[ranks.device.type]
    matrix = torch.ones(side, side, dtype=dtype, device=ranks.device)
    out = torch.empty_like(matrix)
    return 2 * side**3 / best(lambda: torch.mm(matrix, matrix, out=out), ranks)


def _copied(source: torch.device, target: torch.device, ranks: Ranks) -> float:
    """Bytes a second of a copy, from or to pinned memory where one of the two is a GPU."""
    size, pinned = COPIED[ranks.device.type], ranks.device.type == "cuda" and source != target
    tensors = [torch.zeros(size, dtype=torch.uint8, device=place) for place in (source, target)]
    one, other = (tensor.pin_memory() if pinned and tensor.device.type == "cpu" else tensor for tensor in tensors)
    work: Callable[[], Any] = lambda: other.copy_(one, non_blocking=pinned)  # noqa: E731
    return size / best(work, ranks)


def _links(plan: Plan, ranks: Ranks) -> dict[str, float]:
    """Of a collective within each host, and of one over all hosts, which leaves each of them once (a ring)."""
    hosts, first, own = plan.cluster.hosts, 0, None
    for host in hosts:
        members = list(range(first, first + len(host.slots)))
        group = dist.new_group(members)
        own, first = (group if ranks.rank in members else own), first + len(host.slots)
    found = {}
    if min(len(host.slots) for host in hosts) > 1:
        found["node_bytes_per_s"] = all_reduce(ranks, own)["gb_per_s"] * 1e9
    if len(hosts) > 1:
        found["network_bytes_per_s"] = all_reduce(ranks)["gb_per_s"] * 1e9
    return found


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
