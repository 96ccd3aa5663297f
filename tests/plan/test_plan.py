"""Claims about the Plan: it survives its file, and no other content passes for it.

Run by pytest.
Must never start a run.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.cluster.value import Host
from launcher.errors import UserError
from launcher.plan import GLIBC, ModelFacts, Plan, build_plan, read_plan
from launcher.rundir import write_json
from tests.plan.asking import ROOT, composed, planned, refuses

REQUEST = (
    "zero=stage3",
    "offload=cpu",
    "precision=bf16",
    "tracker=wandb",
    "tracker.tags=[a,b]",
    "cluster.env.NOTE=x",
    "run.dir=/runs/a",
)
EDITED = "it was edited or written by another version"


def as_in_file(plan: Plan) -> dict[str, Any]:
    """The plan as a worker reads it: lists for tuples, text for keys."""
    return dict(json.loads(json.dumps(plan.to_json())))


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a plan's JSON that holds no other."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    children = list(items)
    if not children:
        yield path
    for key, item in children:
        yield from paths(item, (*path, key))


def changed(value: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """A copy with another value at `path`."""
    result = copy.deepcopy(value)
    inner: Any = result
    for key in path[:-1]:
        inner = inner[key]
    old = inner[path[-1]]
    inner[path[-1]] = {"new": 1} if isinstance(old, dict) else ["new"] if isinstance(old, list) else f"{old}x"
    return result


def test_a_plan_comes_back_from_its_file_equal(tmp_path: Path) -> None:
    plan = build_plan(composed(*REQUEST), {"NCCL_DEBUG": "INFO"}, resume_from="/runs/a/checkpoints/step_00000010")
    write_json(tmp_path / "plan.json", plan.to_json())
    back = read_plan(tmp_path / "plan.json")
    assert back == plan
    assert back.fingerprint == plan.fingerprint
    assert isinstance(back.cluster.hosts[0], Host) and isinstance(back.cluster.hosts[0].slots, tuple)
    assert as_in_file(back) == as_in_file(plan)


def test_the_file_says_fingerprint_and_world_size() -> None:
    plan = planned("cluster.num_procs=5")
    assert plan.to_json()["fingerprint"] == plan.fingerprint
    assert plan.to_json()["world_size"] == plan.world_size == 5


def test_numbers_as_keys_come_back_equal() -> None:
    """Ten sorts before two as text and after it as a number; a file's keys are text."""
    plan = planned("model.config.id2label={2: a, 10: b}")
    assert Plan.from_json(as_in_file(plan)).fingerprint == plan.fingerprint


def test_a_plan_edited_anywhere_is_refused() -> None:
    value = as_in_file(planned(*REQUEST))
    assert Plan.from_json(copy.deepcopy(value)).fingerprint == value["fingerprint"]
    every = list(paths(value))
    assert len(every) > 80
    for path in every:
        try:
            Plan.from_json(changed(value, path))
        except UserError as error:
            assert error.problems[0].fix == "start a new run; plans are not edited by hand"
        else:
            raise AssertionError(f"an edit of {'.'.join(map(str, path))} passed")


def test_a_plan_with_a_field_too_many_or_too_few_is_refused() -> None:
    value = as_in_file(planned(*REQUEST))
    with refuses("plan.json", EDITED):
        Plan.from_json(value | {"colour": "red"})
    for name in value:
        with refuses("plan.json", EDITED):
            Plan.from_json({key: item for key, item in value.items() if key != name})
    del value["config"]["run"]["steps"]
    with refuses("plan.json", EDITED, "steps"):
        Plan.from_json(value)


def test_a_plan_of_another_version_is_refused_even_with_its_own_fingerprint() -> None:
    other = dataclasses.replace(planned(*REQUEST), version=2)
    with refuses("version 2", EDITED):
        Plan.from_json(as_in_file(other))


@pytest.mark.parametrize(
    "change",
    [
        ["zero=stage2"],
        ["deepspeed.gradient_clipping=2"],
        ["run.seed=1"],
        ["run.steps=201"],
        ["train.micro_batch_size=2"],
        ["data.max_bytes=1"],
        ["model.config.rms_norm_eps=1e-7"],
        ["cluster.num_procs=3"],
        ["cluster.env.NOTE=y"],
        ["tracker.tags=[b,a]"],
        ["checkpoint.keep=3"],
        ["mode=plan"],
    ],
)
def test_another_request_has_another_fingerprint(change: list[str]) -> None:
    assert planned(*REQUEST, *change).fingerprint != planned(*REQUEST).fingerprint


def test_environment_and_resumed_checkpoint_are_part_of_the_fingerprint() -> None:
    config = composed(*REQUEST)
    prints = {
        build_plan(config, {}).fingerprint,
        build_plan(config, {"NCCL_DEBUG": "INFO"}).fingerprint,
        build_plan(config, {}, resume_from="/runs/a/checkpoints/step_00000010").fingerprint,
    }
    assert len(prints) == 3


def test_a_model_of_unknown_family_is_planned_with_its_measured_size() -> None:
    config = composed("model.config.model_type=falcon", "cluster.num_procs=4")
    assert build_plan(config, {}).estimate.textbook_bytes is None
    assert build_plan(config, {}, lambda *asked: ModelFacts(1000)).estimate.parameters == 1000


STABLE = """
import sys
sys.path.insert(0, {root!r})
from tests.plan.asking import planned
print(planned(*{request!r}).fingerprint)
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_fingerprint_is_the_same_in_every_process(seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STABLE.format(root=str(ROOT), request=REQUEST)],
        env={"PYTHONHASHSEED": seed, "PATH": "", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == planned(*REQUEST).fingerprint


def test_1024_hosts_of_8_slots_make_a_plan(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("".join(f"node{number:04d} slots=8\n" for number in range(1024)))
    plan = planned(
        *("cluster=hostfile", f"cluster.hostfile={tmp_path}/hosts", "cluster.accelerator=cuda"),
        *("model=llama_70b", "zero=stage3", "zeropp=hpz", "precision=bf16"),
    )
    assert (plan.world_size, plan.deepspeed["zero_optimization"]["zero_hpz_partition_size"]) == (8192, 8)
    assert plan.cluster.rank_hosts()[8191] == "node1023"
    assert plan.estimate.device_bytes["weights"] == 2 * -(-70_553_706_496 // 8192)
    assert Plan.from_json(as_in_file(plan)) == plan


def test_cluster_problems_stop_before_a_plan(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        planned("cluster=hostfile", f"cluster.hostfile={tmp_path}/none")


def test_ranks_on_a_cpu_alone_are_told_to_give_memory_back(two_hosts: tuple[str, ...]) -> None:
    assert planned().env.items() >= GLIBC.items()
    assert not planned(*two_hosts).env.keys() & GLIBC.keys()
