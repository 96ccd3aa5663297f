"""FLOPs and bytes of one optimizer step, and a hardware's speeds -> how long the step takes, and what bounds it.

Called when a plan is built. Pure arithmetic.
Must never estimate with a speed that is not known: then there is no time at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.planner.collectives import NODE, NODES, Move
from launcher.planner.parts import Shapes
from launcher.planner.setup import MASTER_BYTES, Setup
from launcher.schema import HardwareSection

# Share of its dense peak that a device reaches while it computes a transformer, where none was measured. Megatron-LM
# reports 44 to 52 % of an A100 for models of 1.7 to 1,000 billion parameters, communication included (Narayanan et al.,
# 2021, table 1).
UTILISATION = 0.5
ADAM_BYTES = 28  # a parameter: fp32 master, two moments and gradient read, the first three written


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one optimizer step over all ranks."""

    model_flops: int
    """Of the model: forward, and twice that backward (less where weights are frozen)."""
    recomputed_flops: int
    """Of the layers' second forward with activation checkpointing."""


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of one optimizer step, by what takes them; they add up to `step_s`."""

    compute_s: float
    """Matrix products and attention, at the hardware's utilisation of its peak, else at UTILISATION."""
    node_s: float
    """Collectives within a host, as far as they are not hidden behind computation."""
    network_s: float
    """Collectives that leave a host, as far as they are not hidden behind computation."""
    pcie_s: float
    """Offloaded gradients, weights and parameters between host and device; taken as not hidden."""
    optimizer_s: float
    """The optimizer, which is as fast as the memory that its state lies in."""
    disk_s: float
    """Offloaded state read from NVMe and written back."""
    step_s: float
    """All of them."""
    tokens_per_s: float
    """Tokens of all ranks."""
    mfu: float
    """Model FLOPs of a step over what the devices could do in its time; recomputation does not count."""
    bound: str
    """What takes longest: compute, node, network, pcie, optimizer or disk."""


def work_of(shapes: Shapes, samples: int, length: int, recomputed: bool, trained: int | None = None) -> Work:
    """FLOPs of `samples` sequences of `length` tokens.

    A token costs 2 operations a multiplied parameter forward and 4 backward, 2 of which are the weight's gradient and
    fall away where it is frozen (Kaplan et al., 2020, section 2.1). Attention costs 4 x heads x width for each scored
    pair forward and twice that backward (Narayanan et al., 2021, appendix). `trained`: parameters, where not all are.
    """
    tokens = samples * length
    used = shapes.multiplied * shapes.passes
    learnt = used if trained is None else trained * shapes.passes
    pairs = samples * length * length * shapes.attention
    frozen = 0 if trained is None else used
    model = tokens * (6 * learnt + 4 * frozen) + 12 * pairs
    head = shapes.tied_head or sum(part.parameters for part in shapes.parts if part.name == "head")
    again = tokens * 2 * (used - head * shapes.passes) + 4 * pairs if recomputed else 0
    return Work(round(model), round(again))


def peak_name(setup: Setup) -> str:
    """The option of hardware that has the peak of a step's arithmetic."""
    return "fp32_flops_per_s" if setup.weight == MASTER_BYTES else "bf16_flops_per_s"


def time_of(
    work: Work, tokens: int, moves: Sequence[Move], links: dict[str, int], setup: Setup, share: int, on: HardwareSection
) -> StepTime | None:
    """The estimate, or None where a speed that it needs is not known. `share`: as in `links.links`."""
    peaks = {"fp32_flops_per_s": on.fp32_flops_per_s, "bf16_flops_per_s": on.bf16_flops_per_s}
    peak = peaks[peak_name(setup)]
    if peak is None:
        return None
    compute = (work.model_flops + work.recomputed_flops) / setup.world_size / (peak * (on.utilisation or UTILISATION))
    exposed = _exposed(moves, setup, on, work, compute)
    pcie = _seconds(max(links.get("to_host", 0), links.get("from_host", 0)), on.pcie_bytes_per_s)
    swapped = links.get("disk_read", 0) + links.get("disk_write", 0)
    disk = _seconds(setup.ranks_per_host * swapped, on.disk_bytes_per_s)
    whole = share * setup.world_size if setup.stage == 0 else share
    if setup.offload_optimizer is None:
        optimizer = _seconds(ADAM_BYTES * whole, on.memory_bytes_per_s)
    else:
        optimizer = _seconds(ADAM_BYTES * whole * setup.ranks_per_host, on.host_memory_bytes_per_s)
    if exposed is None or pcie is None or disk is None or optimizer is None:
        return None
    parts = {"compute": compute, **exposed, "pcie": pcie, "optimizer": optimizer, "disk": disk}
    total = sum(parts.values())
    return StepTime(
        **{f"{name}_s": seconds for name, seconds in parts.items()},
        step_s=total,
        tokens_per_s=tokens / total,
        mfu=work.model_flops / setup.world_size / (peak * total),
        bound=max(parts, key=lambda name: parts[name]),
    )


def _exposed(
    moves: Sequence[Move], setup: Setup, on: HardwareSection, work: Work, compute_s: float
) -> dict[str, float] | None:
    """Seconds of collectives that computation does not hide, {node, network}.

    Gathers before use and, with overlap_comm (on by itself at stage 3 alone), reductions run beside their phase's
    computation; below stage 2 only the last micro-batch's. What follows the optimizer is not hidden.
    """
    forward = work.model_flops / 3 / (work.model_flops + work.recomputed_flops) if work.model_flops else 0.0
    overlapped = setup.flag("overlap_comm") and setup.stage > 0
    beside = {"forward": compute_s * forward, "backward": compute_s * (1 - forward), "update": 0.0}
    if setup.stage == 1:
        beside["backward"] /= setup.accumulation
    if not overlapped:
        beside["backward"] = 0.0
    found = {"node": 0.0, "network": 0.0}
    for phase, hidden in beside.items():
        took = {"node": 0.0, "network": 0.0}
        for move in moves:
            if move.phase == phase:
                link, seconds = _slowest(move, setup, on)
                if seconds is None:
                    return None
                took[link] += seconds
        total = sum(took.values())
        for link, seconds in took.items():
            found[link] += seconds * max(0.0, total - hidden) / total if total else 0.0
    return found


def _slowest(move: Move, setup: Setup, on: HardwareSection) -> tuple[str, float | None]:
    """The link on which a collective takes longest, and how long. A ring leaves each host once."""
    if move.scope == NODE or setup.hosts == 1:
        return "node", _seconds(move.sent_bytes, on.node_bytes_per_s)
    leaving = move.sent_bytes * (setup.ranks_per_host if move.scope == NODES else 1)
    network = _seconds(leaving, on.network_bytes_per_s)
    if move.scope == NODES or setup.ranks_per_host == 1 or network is None:
        return "network", network
    node = _seconds(move.sent_bytes, on.node_bytes_per_s)
    return ("node", node) if node is None or node > network else ("network", network)


def _seconds(size: int, per_s: float | None) -> float | None:
    """None where bytes go over a link of unknown speed."""
    if size == 0:
        return 0.0
    return None if per_s is None else size / per_s
