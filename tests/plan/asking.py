"""Requests as tests make them: composed, judged and planned in this process.

Used by the tests of this folder. Nothing of the process's environment but its working folder enters a plan made here.
Must never start anything.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from launcher import ds_config
from launcher.batch import solve
from launcher.cluster.value import Cluster, resolve
from launcher.compose import rewrite_overrides, to_run_config
from launcher.errors import Problem, UserError
from launcher.plan import Plan, build_plan
from launcher.planner.capacity import Capacity
from launcher.planner.choose import choose
from launcher.rules import RULES
from launcher.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"


@functools.cache
def raw(*overrides: str) -> DictConfig:
    """Hydra's config of a request, before it is typed; kept, because composing takes a sixth of a second."""
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return compose("config", rewrite_overrides(list(overrides)))


def composed(*overrides: str) -> RunConfig:
    """The typed request; on CPU unless the overrides say otherwise."""
    config = to_run_config(raw(*overrides))
    if config.cluster.accelerator == "auto":
        config.cluster.accelerator = "cpu"
    return config


def combination(stage: int, offload: str, precision: str) -> list[str]:
    """The request for one choice of each of zero, offload and precision, with what that offload needs."""
    needed = ["deepspeed.zero_optimization.offload_optimizer.nvme_path=/nvme"] if offload == "nvme" else []
    return [f"zero=stage{stage}", f"offload={offload}", f"precision={precision}", *needed]


COMBINATIONS = list(itertools.product(range(4), ("none", "cpu", "cpu_all", "nvme"), ("fp32", "bf16", "fp16")))


def planned(*overrides: str) -> Plan:
    """The plan of a request, with an empty environment."""
    return build_plan(composed(*overrides), {})


def chosen(*overrides: str, memory_bytes: int = 10**18) -> Plan:
    """The plan that is chosen for a request with an auto, where a rank may use `memory_bytes` on a CPU."""
    config = composed(*overrides)
    capacity = Capacity(memory_bytes, 0, None, True, "the test")
    return choose(config, resolve(config.cluster).world_size, capacity, unmeasured).plan


def unmeasured(config: RunConfig, cluster: Cluster | None = None, within: Capacity | None = None) -> Plan:
    """What plans candidates, with an empty environment."""
    return build_plan(config, {}, cluster=cluster, within=within)


def refused(*overrides: str) -> tuple[Problem, ...]:
    """The problems of a request; fails when it is accepted."""
    try:
        planned(*overrides)
    except UserError as error:
        assert error.code == 2
        return error.problems
    raise AssertionError(f"accepted: {' '.join(overrides)}")


def broken_rules(*overrides: str) -> list[str]:
    """Names of the rules that a request breaks, in the order of RULES."""
    config = composed(*overrides)
    cluster = resolve(config.cluster)
    deepspeed = ds_config.build(config, cluster, solve(config.train, cluster.world_size))
    return [rule.__name__ for rule in RULES if rule(config, cluster, deepspeed)]


@contextlib.contextmanager
def refuses(*contents: str) -> Iterator[None]:
    """Asserts that the block raises a UserError whose text, all problems together, holds each of `contents`."""
    try:
        yield
    except UserError as error:
        text = "\n".join(f"{p.where}\n{p.got}\n{p.why}\n{p.fix}" for p in error.problems)
        for content in contents:
            assert content in text, f"{content!r} is not in:\n{text}"
        return
    raise AssertionError("nothing was refused")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in `value` that is neither a mapping nor a list."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, path)
    else:
        yield path, value
