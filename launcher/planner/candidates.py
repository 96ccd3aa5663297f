"""One request -> the same request at other stages, offloads and with or without activation checkpointing, in order.

Used by `choose`, by the gate and by the comparison of mode=plan. Reads the files of conf/zero, conf/offload and
conf/activation; composes nothing. Must never change an option that is not one of those three or the batch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from launcher import provenance
from launcher.cluster.value import Cluster
from launcher.errors import UserError
from launcher.plan import Plan
from launcher.planner.capacity import Capacity, missing
from launcher.planner.memory import DEFAULT_BUCKET_ELEMENTS
from launcher.schema import RunConfig

# (stage, offload): what costs least comes first. Stages 1 and 2 send what plain data parallelism sends, stage 3 half as
# much again; offloads wait for PCIe and a CPU's Adam, then for PCIe at every layer, then for a disk.
ORDER = (
    *(("stage0", "none"), ("stage1", "none"), ("stage2", "none"), ("stage3", "none")),
    *(("stage1", "cpu"), ("stage2", "cpu"), ("stage3", "cpu"), ("stage3", "cpu_all"), ("stage3", "nvme")),
)
STAGES = ("stage0", "stage1", "stage2", "stage3")
OFFLOADS = ("none", "cpu", "cpu_all", "nvme")
ACTIVATIONS = ("none", "full")  # recomputing costs a third more compute
BUCKET, SMALL_BUCKET_ELEMENTS = "reduce_bucket_size", 50_000_000  # a message of 100 MB still fills a link
BLOCKS = ("offload_optimizer", "offload_param")
DEVICES = {(None, None): "none", ("cpu", None): "cpu", ("cpu", "cpu"): "cpu_all", ("nvme", None): "nvme"}


class Build(Protocol):
    """Plans a request, on its own cluster or on another; raises UserError for what the rules refuse.

    `within`: as for `build_plan`.
    """

    def __call__(
        self, config: RunConfig, /, cluster: Cluster | None = None, within: Capacity | None = None
    ) -> Plan: ...


@dataclass(frozen=True)
class Choice:
    """Choices of groups; None leaves what the request has."""

    zero: str | None = None
    offload: str | None = None
    activation: str | None = None

    def overrides(self) -> list[str]:
        """As a user types them."""
        groups = {"zero": self.zero, "offload": self.offload, "activation": self.activation}
        return [f"{group}={name}" for group, name in groups.items() if name is not None]


@dataclass(frozen=True)
class Candidate:
    """A request that could stand in for another, its overrides, and its plan or why there is none."""

    overrides: list[str]
    plan: Plan | None
    refused: str | None
    """What the rules say against it."""
    lacks: dict[str, int] | None
    """{device or host: bytes a rank lacks there}; None where no capacity or no size is known."""

    @property
    def fits(self) -> bool:
        """Whether it is known to fit."""
        return self.lacks == {}


def judged(
    overrides: list[str], config: RunConfig, capacity: Capacity | None, build: Build, closely: bool = True
) -> Candidate:
    """The candidate that `config` is. Not `closely`: only whether it fits, which is known sooner."""
    try:
        plan = build(config, None, None if closely else capacity)
    except UserError as error:
        return Candidate(overrides, None, "; ".join(problem.why for problem in error.problems), None)
    return Candidate(overrides, plan, None, lacking(plan, capacity))


def lacking(plan: Plan, capacity: Capacity | None) -> dict[str, int] | None:
    """{device or host: bytes a rank lacks}; None where capacity or size is not known."""
    memory = plan.estimate.memory
    return None if memory is None or capacity is None else missing(memory, capacity)


def with_choice(config: RunConfig, choice: Choice) -> RunConfig:
    """`config` as if `choice` had been typed behind its overrides."""
    deepspeed = copy.deepcopy(config.deepspeed)
    zero = deepspeed.setdefault("zero_optimization", {})
    if choice.zero is not None:
        zero |= _group("zero", choice.zero)
    if choice.offload is not None and choice.offload != offload_of(config):
        old = {name: zero.pop(name, None) or {} for name in BLOCKS}
        path = nvme_path(config)
        for name, block in _group("offload", choice.offload).items():
            kept = {key: value for key, value in old[name].items() if key not in ("device", "nvme_path")}
            zero[name] = block | kept | ({"nvme_path": path} if block["device"] == "nvme" else {})
    activation = config.activation
    if choice.activation is not None:
        activation = dataclasses.replace(activation, **_group("activation", choice.activation))
    return dataclasses.replace(config, deepspeed=deepspeed, activation=activation)


def with_micro_batch(config: RunConfig, size: int | None) -> RunConfig:
    """`config` with this micro-batch; None: with the one that the other two sizes make."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=size))


def with_small_buckets(config: RunConfig) -> tuple[list[str], RunConfig]:
    """Gradients reduced in more and smaller messages, and the override for it; none where they are small already."""
    zero = config.deepspeed.get("zero_optimization", {})
    if zero.get(BUCKET, DEFAULT_BUCKET_ELEMENTS) <= SMALL_BUCKET_ELEMENTS:
        return [], config
    deepspeed = config.deepspeed | {"zero_optimization": zero | {BUCKET: SMALL_BUCKET_ELEMENTS}}
    words = [f"deepspeed.zero_optimization.{BUCKET}={SMALL_BUCKET_ELEMENTS}"]
    return words, dataclasses.replace(config, deepspeed=deepspeed)


def offload_of(config: RunConfig) -> str | None:
    """The file of conf/offload whose devices the request has; None for devices that are no file's."""
    zero = config.deepspeed.get("zero_optimization", {})
    devices = [(zero.get(name) or {}).get("device") for name in BLOCKS]
    return DEVICES.get((devices[0] if devices[0] != "none" else None, devices[1] if devices[1] != "none" else None))


def nvme_path(config: RunConfig) -> str | None:
    """The folder on a local disk that the request names, for whichever of the two."""
    zero = config.deepspeed.get("zero_optimization", {})
    return next((path for name in BLOCKS if (path := (zero.get(name) or {}).get("nvme_path"))), None)


def choices(config: RunConfig, free: set[str]) -> Iterator[Choice]:
    """Every choice for the `free` ones of zero, offload and activation, the least costly first.

    At a stage and offload, without recomputed activations before with: to recompute sends nothing, the next stage may.
    """
    pairs: list[tuple[str | None, str | None]]
    if {"zero", "offload"} <= free:
        pairs = list(ORDER)
    elif "zero" in free:
        pairs = [(zero, None) for zero in STAGES]
    else:
        pairs = [(None, offload) for offload in OFFLOADS] if "offload" in free else [(None, None)]
    for zero, offload in pairs:
        if offload == "nvme" and nvme_path(config) is None:
            continue
        for activation in ACTIVATIONS if "activation" in free else (None,):
            yield Choice(zero, offload, activation)


@functools.cache
def _file(group: str, name: str) -> dict[str, Any]:
    return provenance.values_of(f"{group}/{name}")


def _group(group: str, name: str) -> dict[str, Any]:
    """What conf/`group`/`name`.yaml sets beneath its package, nested."""
    nested: dict[str, Any] = {}
    prefix = "activation." if group == "activation" else "deepspeed.zero_optimization."
    for path, value in _file(group, name).items():
        if path.startswith(prefix):  # a file that sets nothing only names its block
            *blocks, key = path.removeprefix(prefix).split(".")
            functools.reduce(lambda inner, block: inner.setdefault(block, {}), blocks, nested)[key] = value
    return nested
