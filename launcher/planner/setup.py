"""What of a request decides how DeepSpeed allocates: stage, element sizes, offload, buckets and thresholds, optimizer.

Made from a DeepSpeed dict when a plan is built; defaults are DeepSpeed's own, from its schema.
Must never restate one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher import ds_config
from launcher.cluster.value import Cluster
from launcher.ds_schema import lookup
from launcher.planner.memory import WEIGHT_BYTES
from launcher.schema import RunConfig

MASTER_BYTES = 4
NORM_BYTES = 8  # gradient norms are taken in fp64, tensor by tensor (zero/utils.py, get_norm_dtype)
# Optimizer state beside the master weight, bytes a parameter. Lion's is one moment, but the CPU operator keeps two
# (ops/lion/cpu_lion.py); Muon's matrices have one, its other parameters Adam's two.
STATE_BYTES = {"adam": 8, "adamw": 8, "lion": 4, "adagrad": 4, "muon": 4, "sgd": 0, "lamb": 8, "onebitadam": 8}
# Temporaries of a step of torch's own optimizers, bytes a parameter: the denominator, and its square root before it.
TORCH_STEP_BYTES = 8


@dataclass(frozen=True)
class Setup:
    """Sizes in bytes are per element; numbers of elements and ranks otherwise."""

    stage: int
    world_size: int
    hosts: int
    """Each with equally many ranks."""
    recomputed: bool
    """Whether the forward of every layer runs again in its backward."""
    weight: int
    accumulated: int
    """Of gradients where they are accumulated."""
    sent: int
    """Of gradients where they are reduced."""
    accumulation: int
    """Micro-batches a step."""
    state: int
    """Of the optimizer beside the masters."""
    state_at_most: int
    """The same of the parameters that have most of it: with Muon those that are no matrices."""
    step_temporary: int
    """Of temporaries of the optimizer's step."""
    average: int
    """Of the moving average of the weights, 0 without."""
    offload_optimizer: str | None
    offload_param: str | None
    one_memory: bool
    """Whether the device's memory is the host's: on a CPU."""
    zero: dict[str, Any]

    @staticmethod
    def of(config: RunConfig, deepspeed: dict[str, Any], cluster: Cluster) -> Setup:
        """What a request and the dict that the engine gets come to."""
        precision, accumulated = ds_config.precision(deepspeed), ds_config.accumulation(deepspeed)
        named = str(deepspeed.get("communication_data_type") or "").lower()
        optimizer = deepspeed.get("optimizer", {})
        params = optimizer.get("params", {})
        kind, offload = str(optimizer.get("type", "")).lower(), ds_config.offload_device(deepspeed, "optimizer")
        state = STATE_BYTES.get(kind, 8)
        if kind == "sgd" and params.get("momentum"):
            state = 4
        if kind == "lion" and offload:
            state = 8
        plain = kind in ("adam", "adamw") and params.get("torch_adam")
        return Setup(
            stage=ds_config.zero_stage(deepspeed),
            world_size=cluster.world_size,
            hosts=len(cluster.hosts),
            recomputed=bool(config.activation.checkpointing),
            weight=WEIGHT_BYTES[precision],
            accumulated=WEIGHT_BYTES[accumulated],
            sent=WEIGHT_BYTES.get(named, WEIGHT_BYTES[precision]),
            accumulation=int(deepspeed.get("gradient_accumulation_steps", 1)),
            state=state,
            state_at_most=STATE_BYTES["adam"] if kind == "muon" else state,
            step_temporary=TORCH_STEP_BYTES if plain else 0,
            average=MASTER_BYTES if config.ema.decay is not None else 0,
            offload_optimizer=offload,
            offload_param=ds_config.offload_device(deepspeed, "param"),
            one_memory=cluster.accelerator == "cpu",
            zero=dict(deepspeed.get("zero_optimization", {})),
        )

    @property
    def ranks_per_host(self) -> int:
        """Ranks of a host."""
        return self.world_size // self.hosts

    def number(self, name: str) -> int:
        """Value of a key of zero_optimization, given or DeepSpeed's default."""
        key = lookup(f"zero_optimization.{name}")
        assert key is not None, name
        given = next((self.zero[each] for each in (key.name, *key.aliases) if each in self.zero), key.default)
        return int(given)

    def block_number(self, block: str, name: str) -> int:
        """The same of a key of offload_optimizer or offload_param."""
        key = lookup(f"zero_optimization.{block}.{name}")
        assert key is not None, name
        return int((self.zero.get(block) or {}).get(name, key.default))

    def flag(self, name: str) -> bool:
        """The same of a key that is true or false; overlap_comm's default is stage 3's own (zero/config.py)."""
        key = lookup(f"zero_optimization.{name}")
        assert key is not None, name
        given = self.zero.get(name, key.default)
        return self.stage == 3 if given is None else bool(given)
