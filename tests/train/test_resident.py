"""A model that stage 3 never partitions trains alike without DeepSpeed's hooks on its modules, whatever is gathered.

Run by pytest; ranks are those of engine_server.py, what they do is in resident_ranks.py.
Must never compare with a curve that has no step of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.rundir import RunDir
from tests.plan.asking import planned
from tests.train.engines import LLAMA, Engines, request
from tests.train.running import losses

pytestmark = pytest.mark.train
LOOP = tuple(word for word in LLAMA if "vocab_size" not in word)  # the corpus is bytes
PERSISTENCE = "deepspeed.zero_optimization.stage3_param_persistence_threshold"


def asked(engines: Engines, function: str, *overrides: str, at_once: bool, **case: Any) -> dict[str, Any]:
    """The answer of `function` for the tiny model at stage 3."""
    plan = planned(*request("zero=stage3", "deepspeed.optimizer.params.lr=0.01", *overrides))
    case |= {"plan": plan.to_json(), "at_once": at_once}
    answer = engines.call(f"tests.train.resident_ranks:{function}", plan.world_size, **case)
    assert "error" not in answer, answer["error"] + answer["log"]
    return answer


@pytest.mark.parametrize("activation", ["none", "full"])
def test_it_trains_alike_and_only_the_model_as_a_whole_has_hooks(engines: Engines, activation: str) -> None:
    overrides = [f"activation={activation}"]
    hooked = asked(engines, "train", *overrides, at_once=False, partitioned=False)
    at_once = asked(engines, "train", *overrides, at_once=True, partitioned=False)
    whole, inside = hooked["hooks"]
    assert at_once["hooks"] == [whole, inside - hooked["inside"]]  # one of ours for two of DeepSpeed's
    assert at_once["losses"] == hooked["losses"] and at_once["norms"] == hooked["norms"]
    assert at_once["losses"][-1] != at_once["losses"][0] and all(at_once["whole"])


def test_what_is_partitioned_between_forward_and_backward_is_fetched_again(engines: Engines) -> None:
    quiet = asked(engines, "train", at_once=True, partitioned=False)
    disturbed = asked(engines, "train", at_once=True, partitioned=True)
    assert disturbed["losses"] == quiet["losses"] and disturbed["norms"] == quiet["norms"]


def test_a_module_inside_may_be_called_by_itself(engines: Engines) -> None:
    hooked = asked(engines, "called_alone", at_once=False)["found"]
    at_once = asked(engines, "called_alone", at_once=True)["found"]
    assert at_once == hooked and at_once[1] != at_once[0]


def test_the_loop_waits_for_the_audit_and_the_curve_is_the_same(engines: Engines, tmp_path: Path) -> None:
    """Nothing partitioned: at once without an audit, after its steps with one; partitioned: never."""
    curves = []
    cases = [(["audit=off"], [0]), (["audit=warn", "audit.steps=2"], [2]), (["audit=off", f"{PERSISTENCE}=0"], [])]
    for number, (overrides, taken) in enumerate(cases):
        run = RunDir(tmp_path / str(number))
        run.create()
        plan = planned(*request("zero=stage3", "run.steps=5", "eval.samples=2", "eval.every=0", *overrides, base=LOOP))
        case = {"plan": plan.to_json(), "run_dir": str(run.path)}
        answer = engines.call("tests.train.resident_ranks:through_the_loop", plan.world_size, **case)
        assert "error" not in answer, answer["error"] + answer["log"]
        assert answer["taken"] == taken, overrides
        curves.append(losses(run.path))
    assert len(curves[0]) == 5 and curves[0] == curves[1] == curves[2]


@pytest.mark.parametrize(
    ("overrides", "partitioned"),
    [
        ([], False),
        ([f"{PERSISTENCE}=1000"], True),
        (["deepspeed.zero_optimization.stage3_model_persistence_threshold=5000"], True),
        (["offload=cpu_all"], True),
    ],
    ids=["short parameters", "a longer one", "more than the model may keep", "parameters on the host"],
)
def test_one_parameter_that_is_partitioned_keeps_every_hook(
    engines: Engines, overrides: list[str], partitioned: bool
) -> None:
    answer = asked(engines, "train", *overrides, at_once=False, partitioned=False)
    assert answer["partitioned"] is partitioned
