"""Collectives and offload of one optimizer step -> bytes on every link: within a host, between hosts, PCIe, disk.

Called when a plan is built. Pure arithmetic; what is copied when, is read off DeepSpeed 0.19.8.
Must never turn bytes into seconds: `launcher.planner.timing` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.planner.collectives import NODE, NODES, Move
from launcher.planner.memory import MOMENT_BYTES
from launcher.planner.setup import MASTER_BYTES, Setup

SUMMED_BYTES = 4  # of a gradient that the host's optimizer takes


def links(found: Sequence[Move], setup: Setup, share: int) -> dict[str, int]:
    """Bytes of one step, those that are 0 left out. `share`: elements of a rank's part of what is trained.

    `node`: sent by a rank to others of its host. `network`: sent by a host to others; a ring over all ranks leaves
    and enters each host once, so a host sends what one rank does. `to_host`, `from_host`: over a rank's PCIe.
    `disk_read`, `disk_write`: of a rank's part on NVMe.
    """
    node = network = 0
    for move in found:
        if move.scope == NODES:
            network += move.sent_bytes * setup.ranks_per_host
        elif setup.hosts == 1 or move.scope == NODE:
            node += move.sent_bytes
        else:
            network += move.sent_bytes
            node += move.sent_bytes if setup.ranks_per_host > 1 else 0
    bytes_of = {"node": node, "network": network}
    for name, size in _optimizer(setup, share).items():
        bytes_of[name] = bytes_of.get(name, 0) + size
    for name, size in _parameters(found, setup, share).items():
        bytes_of[name] = bytes_of.get(name, 0) + size
    return {name: size for name, size in bytes_of.items() if size}


def _optimizer(setup: Setup, share: int) -> dict[str, int]:
    """Gradients to the host, weights back, and with NVMe the whole optimizer state through the host.

    Stages 1 and 2 keep the sum of several micro-batches on the host: each brings it back, adds, and sends it again
    (async_accumulate_grad_in_cpu_via_gpu); the optimizer takes it in fp32. Stage 3 does so with every micro-batch and
    fetches the first one back too (stage3.py, partition_grads). Its optimizer swapper reads and writes masters, moments
    and gradients (partitioned_optimizer_swapper.py).
    """
    if setup.offload_optimizer is None or setup.stage == 0:
        return {}
    weight, several = setup.weight, setup.accumulation > 1
    out = back = 0
    if setup.stage == 3:
        out = back = weight * setup.accumulation
    elif several:
        out, back = weight * setup.accumulation, weight * (setup.accumulation - 1)
    out += SUMMED_BYTES
    back += 0 if setup.offload_param else weight
    moved = {"to_host": out * share, "from_host": back * share}
    if setup.offload_optimizer == "nvme" and setup.stage == 3:
        state = (MASTER_BYTES + MOMENT_BYTES + SUMMED_BYTES) * share
        moved |= {"disk_read": state, "disk_write": state}
    return moved


def _parameters(found: Sequence[Move], setup: Setup, share: int) -> dict[str, int]:
    """Offloaded parameters: a rank's part goes to the device for every gather; from NVMe it is read each time, and
    written once a step."""
    if setup.offload_param is None or setup.stage != 3:
        return {}
    gathered = sum(move.logged_bytes for move in found if move.collective == "all_gather_into_tensor")
    updated = setup.weight * share
    moved = {"from_host": gathered, "to_host": 0 if setup.offload_optimizer else updated}
    if setup.offload_param == "nvme":
        moved |= {"disk_read": gathered, "disk_write": updated}
    return moved
