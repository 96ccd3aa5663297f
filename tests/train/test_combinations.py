"""Combinations of the shipped groups that a plan accepts: the real engine takes them, honours them, and learns.

Run by pytest. All 4,320 are judged for two ranks on a CPU; of the accepted ones a fixed sample trains, in which every
two choices that can stand together do. Must never compile an operator: what needs a missing one is skipped by name.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from launcher import ds_config
from launcher.batch import solve
from launcher.cluster.value import resolve
from launcher.rules import judge
from tests.plan.asking import CONF, composed, planned
from tests.train.engines import Engines, request

pytestmark = pytest.mark.train

GROUPS = ("zero", "offload", "zeropp", "precision", "optim", "schedule")
SEED = 7  # of the order in which combinations are tried
MORE = 20  # combinations besides the cover, at random: together they train in under a minute
STEPS = 5  # under a warm-up the first two have a learning rate of 0
# Stage and offload decide where the same numbers are, not which. Seen: none, but 1e-7 for Adagrad in fp32 and 1e-5 for
# Muon in bf16, which rounds sums that stages take in another order to 8 bits.
TOLERANCE = 1e-4

Choice = tuple[str, ...]


def fragment(group: str, name: str) -> dict[str, Any]:
    """The DeepSpeed keys of one group file, at the place its header names: composing each request takes 0.2 s."""
    text = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8")
    package = text.splitlines()[0].removeprefix("# @package ").split(".")
    assert package[0] == "deepspeed"
    value: Any = OmegaConf.to_container(OmegaConf.create(text.replace("???", "/nvme"))) or {}
    for part in reversed(package[1:]):
        value = {part: value}
    return dict(value)


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Later parts win, block by block."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


@cache
def judged() -> dict[Choice, bool]:
    """Every combination of one file per group, and whether the rules accept it."""
    config = composed(*request())
    cluster = resolve(config.cluster)
    batch = solve(config.train, cluster.world_size)
    files = [sorted(path.stem for path in (CONF / group).glob("*.yaml")) for group in GROUPS]
    names = [[name for name in of if name != "auto"] for of in files]  # which becomes one of the others
    read = {(group, name): fragment(group, name) for group, of in zip(GROUPS, names, strict=True) for name in of}
    result = {}
    for choice in itertools.product(*names):
        parts = [read[key] for key in zip(GROUPS, choice, strict=True)]
        asked = dataclasses.replace(config, deepspeed=merged({"gradient_clipping": 1.0}, *parts))
        result[choice] = not judge(asked, cluster, ds_config.build(asked, cluster, batch))
    return result


def pairs(choice: Choice) -> set[tuple[Any, ...]]:
    """Every two of its choices, with their groups."""
    return set(itertools.combinations(zip(GROUPS, choice, strict=True), 2))


def sample(fp16: bool) -> list[Choice]:
    """Accepted combinations that hold every accepted pair of choices, and MORE whose curve one of those has too.

    `fp16`: whether this CPU computes in it; without it they are those of the other precisions.
    """
    accepted = [choice for choice, is_accepted in judged().items() if is_accepted and (fp16 or "fp16" not in choice)]
    random.Random(SEED).shuffle(accepted)
    missing = set().union(*map(pairs, accepted))
    chosen: list[Choice] = []
    while missing:
        chosen.append(max(accepted, key=lambda choice: len(pairs(choice) & missing)))
        missing -= pairs(chosen[-1])
    curves = {choice[3:] for choice in chosen}
    rest = [choice for choice in accepted if choice not in chosen and choice[3:] in curves]
    return chosen + rest[:MORE]


def asked_for(choice: Choice, folder: Path) -> tuple[str, ...]:
    """The request of a combination."""
    path = [f"deepspeed.zero_optimization.offload_optimizer.nvme_path={folder}"] if "nvme" in choice else []
    return request(*(f"{group}={name}" for group, name in zip(GROUPS, choice, strict=True)), *path)


def test_a_fixed_number_of_combinations_is_accepted() -> None:
    assert len(judged()) == 4 * 4 * 5 * 3 * 6 * 3
    assert sum(judged().values()) == 537  # a change of conf/ or of a rule changes it: look at what it lets through


def test_accepted_combinations_train_as_asked(engines: Engines, tmp_path: Path) -> None:
    chosen, skipped, failed = sample(engines.fp16), [], []
    curves: dict[Choice, list[list[float]]] = {}
    for choice in chosen:
        plan = planned(*asked_for(choice, tmp_path))
        if (lacking := engines.lacks(plan)) is not None:
            skipped.append(f"{' '.join(choice)}: {lacking}")
            continue
        answer = engines.run(plan, STEPS)
        if "error" in answer or answer["ignored"] or not math.isfinite(sum(answer["losses"])):
            failed.append((choice, answer.get("error"), answer.get("ignored"), answer.get("losses")))
            continue
        if not answer["losses"][-1] < answer["losses"][0]:
            failed.append((choice, "it does not learn", [], answer["losses"]))
        curves.setdefault(choice[3:], []).append(answer["losses"])
    print(f"{len(chosen)} of {sum(judged().values())} accepted combinations trained, {len(skipped)} skipped")
    assert failed == []
    for same, found in curves.items():
        for losses in found[1:]:
            assert losses == pytest.approx(found[0], rel=TOLERANCE), same
    if skipped:
        pytest.skip("; ".join(skipped))
