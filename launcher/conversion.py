"""What it takes to lay a checkpoint out anew for other ranks, another stage, offload or precision.

Called by `launcher.cli` for a resume, before it begins. Pure arithmetic over plan, manifest and the time of its check.
Must never be silent where a rank would load the state in another form than it was saved in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from launcher.plan import Plan

# fp32 tensors of a weight's shape that the optimizer keeps beside its master.
MOMENTS = {"adam": 2, "adamw": 2, "lion": 1, "adagrad": 1, "sgd": 1}
GB = 1e9


@dataclass(frozen=True)
class Conversion:
    """Of the host with the most ranks. Nothing is written to a disk."""

    read_bytes: int
    """Read from the checkpoint."""
    host_bytes: int
    """Memory that its ranks hold together while they load, at most: state in flat fp32, until it is where it stays."""
    seconds: float | None
    """Time to read, at the speed at which the checkpoint was checked; None where that is not known."""

    def told(self, old: str, new: str) -> str:
        """One line for a human; `old` and `new` name the layouts."""
        time = "" if self.seconds is None else f", about {max(1, round(self.seconds))} s"
        size = f"reads {self.read_bytes / GB:.3f} GB and holds up to {self.host_bytes / GB:.3f} GB of memory"
        return f"saved as {old}, loaded as {new}: a host {size} while it loads{time}; no copy is written"


def conversion(plan: Plan, checkpoint: dict[str, Any]) -> Conversion | None:
    """What the plan's ranks need to load `checkpoint`, found by `run.whole_checkpoint`; None where nothing changes."""
    manifest = checkpoint["manifest"]
    if saved_layout(manifest) == wanted_layout(plan):
        return None
    names = [name for group in manifest["trained"] for name in group] or list(manifest["parameters"])
    elements = sum(math.prod(manifest["parameters"][name]) for name in names)
    optimizer = plan.deepspeed.get("optimizer", {})
    moments = MOMENTS.get(str(optimizer.get("type")).lower(), 2)
    if str(optimizer.get("type")).lower() == "sgd" and not optimizer.get("params", {}).get("momentum"):
        moments = 0
    state = 4 * elements * (1 + moments + (plan.config.ema.decay is not None))
    ranks = max(len(host.slots) for host in plan.cluster.hosts)
    part = ranks / plan.world_size
    read = state if plan.zero_stage == 0 else math.ceil(state * part)
    held = state * ranks if plan.zero_stage == 0 else read
    took = checkpoint.get("checked_s")
    whole = sum(entry["bytes"] for entry in manifest["files"].values())
    return Conversion(read, held, read / whole * took if took and whole else None)


def saved_layout(manifest: dict[str, Any]) -> str:
    """The layout of a checkpoint in words."""
    keys = ("precision", "accumulation", "offload_optimizer", "offload_param")
    return _words(manifest["world_size"], manifest["zero_stage"], *(manifest[key] for key in keys))


def wanted_layout(plan: Plan) -> str:
    """The layout of a plan in words."""
    devices = (plan.offload_device("optimizer"), plan.offload_device("param"))
    return _words(plan.world_size, plan.zero_stage, plan.precision, plan.accumulation, *devices)


def _words(ranks: int, stage: int, precision: str, accumulation: str, optimizer: str | None, param: str | None) -> str:
    offloaded = [f"{what} on {where}" for what, where in (("optimizer", optimizer), ("weights", param)) if where]
    kind = precision if precision == accumulation else f"{precision} summed in {accumulation}"
    return ", ".join([f"{ranks} rank{'s' * (ranks != 1)} at stage {stage} in {kind}", *offloaded])
