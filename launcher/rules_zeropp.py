"""Rules about ZeRO++: hierarchical partitions (hpZ), quantised weights and gradients.

One function each, listed in `launcher.rules`; a file named in a docstring is DeepSpeed 0.19.8's and shows the reason.
Must never warn: what cannot be honoured is refused with its fix.
"""

from __future__ import annotations

from typing import Any

from launcher.cluster.value import Cluster
from launcher.ds_config import zero_stage
from launcher.errors import Problem
from launcher.schema import RunConfig

HPZ = "deepspeed.zero_optimization.zero_hpz_partition_size"


def zeropp_needs_stage3(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/engine.py: no key of ZeRO++ reaches stages 1 and 2.

    The request counts too: on one host hpZ "auto" is solved by leaving it out.
    """
    keys = list(dict.fromkeys(_zeropp_keys(config.deepspeed) + _zeropp_keys(ds)))
    stage = zero_stage(ds)
    if not keys or stage == 3:
        return None
    return Problem(
        "zeropp",
        f"{', '.join(keys)} at stage {stage}",
        "ZeRO++ works on partitioned parameters; DeepSpeed would ignore it",
        "use zero=stage3, or zeropp=off",
    )


def quantised_zeropp_needs_cuda(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """ops/op_builder/cpu: the quantizer is not implemented there; the engine stops when it is built."""
    keys = [key for key in _zeropp_keys(ds) if "quantized" in key]
    if not keys or cluster.accelerator == "cuda":
        return None
    return Problem(
        "zeropp",
        f"{', '.join(keys)} on {cluster.accelerator}",
        "the quantisation kernels exist for CUDA only",
        "use zeropp=off or hpz",
    )


def quantised_gradients_need_hosts(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """runtime/zero/stage3.py, __avg_scatter_grads: the quantised all-to-all runs when there are several hosts."""
    if not ds.get("zero_optimization", {}).get("zero_quantized_gradients") or len(cluster.hosts) > 1:
        return None
    return Problem(
        "zeropp",
        "zero_quantized_gradients on one host",
        "DeepSpeed falls back to the plain reduce-scatter when there is one host",
        "use zeropp=off here, or several hosts",
    )


def hpz_divides_the_world(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """utils/groups.py, _create_zero_param_parallel_group: asserts it; a size above the world is cut to it."""
    size = ds.get("zero_optimization", {}).get("zero_hpz_partition_size")
    # "auto" stands here only while another problem keeps it from being solved
    if size in (None, "auto") or (
        isinstance(size, int) and 1 <= size <= cluster.world_size and not cluster.world_size % size
    ):
        return None
    return Problem(
        HPZ,
        str(size),
        f"it must divide the {cluster.world_size} ranks",
        "use zeropp=hpz, which takes the slots of a host",
    )


def hpz_groups_lie_within_a_host(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """utils/groups.py makes groups of consecutive ranks: one that crosses hosts gathers over the network again."""
    size = ds.get("zero_optimization", {}).get("zero_hpz_partition_size")
    crossing = [host for host in cluster.hosts if isinstance(size, int) and size > 1 and len(host.slots) % size]
    if not crossing or len(cluster.hosts) == 1 or hpz_divides_the_world(config, cluster, ds):
        return None
    return Problem(
        HPZ,
        f"{size} with {', '.join(f'{host.name} ({len(host.slots)} slots)' for host in crossing)}",
        "groups of so many ranks would cross hosts, and hpZ exists to keep gathers inside one",
        "use zeropp=hpz, which takes the slots of a host, or a number that divides the slots of every host",
    )


def _zeropp_keys(ds: dict[str, Any]) -> list[str]:
    zero = ds.get("zero_optimization", {})
    chosen = {
        "zero_hpz_partition_size": zero.get("zero_hpz_partition_size") not in (None, 1),
        "zero_quantized_weights": bool(zero.get("zero_quantized_weights")),
        "zero_quantized_gradients": bool(zero.get("zero_quantized_gradients")),
        "zero_quantized_nontrainable_weights": bool(zero.get("zero_quantized_nontrainable_weights")),
    }
    return [key for key, is_chosen in chosen.items() if is_chosen]
