"""Collectives and offload of one optimizer step -> bytes on every link: within a host, between hosts, PCIe, disk.

Called when a plan is built. Pure arithmetic; what is copied when, is read off DeepSpeed 0.19.8.
Must never turn bytes into seconds: `launcher.planner.timing` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.planner.collectives import NODE, NODES, Move, Step
from launcher.planner.memory import MOMENT_BYTES, WEIGHT_BYTES

MASTER_BYTES = 4
SUMMED_BYTES = 4  # of a gradient that the host's optimizer takes


@dataclass(frozen=True)
class Offload:
    """Devices (None, cpu or nvme) of the optimizer and of the parameters, and elements of a rank's trained share."""

    optimizer: str | None
    param: str | None
    share: int


def links(found: Sequence[Move], step: Step, offload: Offload) -> dict[str, int]:
    """Bytes of one step, those that are 0 left out.

    `node`: sent by a rank to others of its host. `network`: sent by a host to others; a ring over all ranks leaves
    and enters each host once, so a host sends what one rank does. `to_host`, `from_host`: over a rank's PCIe.
    `disk_read`, `disk_write`: of a rank's part on NVMe.
    """
    node = network = 0
    for move in found:
        if move.scope == NODES:
            network += move.sent_bytes * step.local
        elif step.hosts == 1 or move.scope == NODE:
            node += move.sent_bytes
        else:
            network += move.sent_bytes
            node += move.sent_bytes if step.local > 1 else 0
    bytes_of = {"node": node, "network": network}
    for name, size in _optimizer(step, offload).items():
        bytes_of[name] = bytes_of.get(name, 0) + size
    for name, size in _parameters(found, step, offload).items():
        bytes_of[name] = bytes_of.get(name, 0) + size
    return {name: size for name, size in bytes_of.items() if size}


def _optimizer(step: Step, offload: Offload) -> dict[str, int]:
    """Gradients to the host, weights back, and with NVMe the whole optimizer state through the host.

    Stages 1 and 2 keep the sum of several micro-batches on the host: each brings it back, adds, and sends it again
    (async_accumulate_grad_in_cpu_via_gpu); the optimizer takes it in fp32. Stage 3 does so with every micro-batch and
    fetches the first one back too (stage3.py, partition_grads). Its optimizer swapper reads and writes masters, moments
    and gradients (partitioned_optimizer_swapper.py).
    """
    if offload.optimizer is None or step.stage == 0:
        return {}
    weight, several = WEIGHT_BYTES[step.precision], step.micro_batches > 1
    out = back = 0
    if step.stage == 3:
        out = back = weight * step.micro_batches
    elif several:
        out, back = weight * step.micro_batches, weight * (step.micro_batches - 1)
    out += SUMMED_BYTES
    back += 0 if offload.param else weight
    moved = {"to_host": out * offload.share, "from_host": back * offload.share}
    if offload.optimizer == "nvme" and step.stage == 3:
        state = (MASTER_BYTES + MOMENT_BYTES + SUMMED_BYTES) * offload.share
        moved |= {"disk_read": state, "disk_write": state}
    return moved


def _parameters(found: Sequence[Move], step: Step, offload: Offload) -> dict[str, int]:
    """Offloaded parameters: a rank's part goes to the device for every gather; from NVMe it is read each time, and
    written once a step."""
    if offload.param is None or step.stage != 3:
        return {}
    gathered = sum(move.logged_bytes for move in found if move.collective == "all_gather_into_tensor")
    updated = WEIGHT_BYTES[step.precision] * offload.share
    moved = {"from_host": gathered, "to_host": 0 if offload.optimizer else updated}
    if offload.param == "nvme":
        moved |= {"disk_read": gathered, "disk_write": updated}
    return moved
