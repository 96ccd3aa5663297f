"""Rules about what is kept of the weights: a moving average, the best checkpoint, and when none better is to come.

One function each, listed in `launcher.rules`. Must never warn: what cannot be honoured is refused with its fix.
"""

from __future__ import annotations

from typing import Any

from launcher.cluster.value import Cluster
from launcher.ds_config import accumulation, offload_device, precision, zero_stage
from launcher.errors import Problem
from launcher.rules_optimizer import LAID_OUT_ANEW, optimizer_name
from launcher.schema import RunConfig


def ema_decay_is_a_fraction(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    decay = config.ema.decay
    if decay is None or 0 < decay < 1:
        return None
    return Problem("ema.decay", str(decay), "an average keeps between nothing and all of itself", "ema.decay=0.999")


def ema_needs_masters_in_memory(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """The average lies beside the optimizer's moments, one value for each of an fp32 master."""
    if config.ema.decay is None:
        return None
    stage, kind, zero = zero_stage(ds), precision(ds), ds.get("zero_optimization", {})
    offload = zero.get("offload_optimizer") or {}
    reduced = f"{kind}_master_weights_and_grads"
    why = None
    if optimizer_name(ds) not in LAID_OUT_ANEW:
        why = f"{optimizer_name(ds)} keeps no state of the weights' own shapes beside which it could lie"
    elif offload_device(ds, "optimizer") == "nvme":
        why = "with offload=nvme the weights' fp32 masters lie in swap files"
    elif "zenflow" in zero or offload.get("super_offload") or offload.get("ratio", 1.0) < 1.0:
        why = "with zenflow, super_offload or ratio the masters are in two places"
    elif stage == 0 and kind != "fp32":
        why = f"at stage 0 in {kind} DeepSpeed keeps the masters in a form of its own"
    elif (stage, kind, accumulation(ds)) == (1, "bf16", "fp32") and offload_device(ds, "optimizer") is None:
        why = "bf16 at stage 1 with fp32 accumulation keeps the masters in a form of its own"
    elif ds.get(kind, {}).get(reduced):
        why = f"{reduced} leaves no fp32 masters"
    if why is None:
        return None
    return Problem("ema.decay", str(config.ema.decay), why, "leave ema.decay out, or choose another stage or optimizer")


def best_needs_evaluations(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """Without evaluations during the run no loss is better than another."""
    asked = {"eval.patience": config.eval.patience, "checkpoint.best": config.checkpoint.best}
    if config.eval.every and config.eval.samples:
        return []
    fix = "eval.every=50 or another number of steps, with eval.samples above 0"
    return [
        Problem(name, str(value), "no evaluation is made before the run's end, which it would go by", fix)
        for name, value in asked.items()
        if value
    ]


def smallest_gain_is_a_gain(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    least = config.eval.min_delta
    if least == 0 or (least > 0 and (config.eval.patience or config.checkpoint.best)):
        return None
    if least < 0:
        return Problem("eval.min_delta", str(least), "a better loss is a lower one", "eval.min_delta=0 or more")
    why = "nothing goes by which evaluation is the best, so it would be ignored"
    return Problem("eval.min_delta", str(least), why, "add eval.patience=3 or checkpoint.best=true")
