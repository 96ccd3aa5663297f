"""The DeepSpeed dicts of every legal zero x offload x precision, compared with committed ones.

Run by pytest; golden/deepspeed.json holds the dicts, for two ranks and nothing else overridden.
Must never compare what depends on the machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher import ds_config
from launcher.batch import Batch
from launcher.cluster.value import resolve
from launcher.plan import build_plan
from tests.plan import goldens
from tests.plan.asking import COMBINATIONS, broken_rules, combination, composed, leaves, planned


def test_deepspeed_dicts_are_the_committed_ones() -> None:
    dicts = {}
    for stage, offload, precision in COMBINATIONS:
        request = combination(stage, offload, precision)
        if not broken_rules(*request):
            dicts[f"stage{stage} {offload} {precision}"] = planned(*request).deepspeed
    assert len(dicts) == 25
    goldens.compare("deepspeed.json", a_line_per_block(dicts))


def a_line_per_block(dicts: dict[str, dict[str, Any]]) -> str:
    """JSON in which a changed block is one changed line."""
    texts = []
    for name, value in dicts.items():
        blocks = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value[key], sort_keys=True)}" for key in sorted(value))
        texts.append(f"  {json.dumps(name)}: {{\n{blocks}\n  }}")
    return "{\n" + ",\n".join(texts) + "\n}\n"


def test_a_difference_shows_the_changed_lines_and_how_to_accept_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(goldens, "FOLDER", tmp_path)
    monkeypatch.delenv(goldens.ACCEPT, raising=False)
    (tmp_path / "x.txt").write_text("same\nold\nsame too\n")
    with pytest.raises(AssertionError) as failure:
        goldens.compare("x.txt", "same\nnew\nsame too\n")
    assert "\n-old\n+new\n" in str(failure.value)
    assert "ZEROLAUNCH_ACCEPT=1 pytest tests/plan" in str(failure.value)
    monkeypatch.setenv(goldens.ACCEPT, "1")
    goldens.compare("x.txt", "same\nnew\nsame too\n")
    assert (tmp_path / "x.txt").read_text() == "same\nnew\nsame too\n"


def test_a_missing_golden_file_is_a_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(goldens, "FOLDER", tmp_path)
    monkeypatch.delenv(goldens.ACCEPT, raising=False)
    with pytest.raises(AssertionError, match=r"golden/x\.txt differs"):
        goldens.compare("x.txt", "new\n")


# --- what Python fills in --------------------------------------------------------------------------------------------


def test_the_batch_and_the_schedules_length_are_filled_in() -> None:
    plan = planned("run.steps=77", "train.micro_batch_size=3", "train.gradient_accumulation_steps=5")
    assert plan.deepspeed["train_batch_size"] == 30
    assert plan.deepspeed["train_micro_batch_size_per_gpu"] == 3
    assert plan.deepspeed["gradient_accumulation_steps"] == 5
    assert plan.deepspeed["scheduler"]["params"]["total_num_steps"] == 77


@pytest.mark.parametrize(("steps", "warmup"), [(1, 1), (9, 1), (77, 7), (20_000, 2_000), (100_000, 2_000)])
@pytest.mark.parametrize("schedule", ["warmup_cosine", "warmup_decay"])
def test_a_warm_up_takes_a_tenth_of_the_run_and_2000_steps_at_most(schedule: str, steps: int, warmup: int) -> None:
    config = composed(f"schedule={schedule}")
    config.run.steps = steps
    params = build_plan(config, {}).deepspeed["scheduler"]["params"]
    assert (params["warmup_num_steps"], params["total_num_steps"]) == (warmup, steps)


def test_a_chosen_warm_up_stays() -> None:
    assert planned("deepspeed.scheduler.params.warmup_num_steps=33").deepspeed["scheduler"]["params"] == {
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 33,
        "cos_min_ratio": 0.1,
        "warmup_type": "linear",
        "total_num_steps": 200,
    }


def test_a_warm_up_ends_at_the_optimizers_learning_rate() -> None:
    params = planned("schedule=warmup_decay", "deepspeed.optimizer.params.lr=0.5").deepspeed["scheduler"]["params"]
    assert params["warmup_max_lr"] == 0.5
    peak = ("~deepspeed.optimizer.params.lr", "deepspeed.scheduler.params.warmup_max_lr=0.25")
    chosen = planned("schedule=warmup_decay", *peak).deepspeed
    assert chosen["scheduler"]["params"]["warmup_max_lr"] == 0.25


def test_a_constant_schedule_leaves_no_scheduler() -> None:
    assert "scheduler" not in planned("schedule=constant").deepspeed


def test_hpz_groups_are_the_slots_of_a_host(two_hosts: tuple[str, ...]) -> None:
    zero = planned(*two_hosts, "zero=stage3", "zeropp=hpz").deepspeed["zero_optimization"]
    assert zero == {"stage": 3, "zero_hpz_partition_size": 4}


def test_hpz_is_left_out_on_one_host(one_host: tuple[str, ...]) -> None:
    """deepspeedai/DeepSpeedExamples#717: a recipe written for a cluster is first tried on one host."""
    assert planned(*one_host, "zero=stage3", "zeropp=hpz").deepspeed["zero_optimization"] == {"stage": 3}


def test_nothing_auto_is_left(two_hosts: tuple[str, ...]) -> None:
    """deepspeedai/DeepSpeed#1270: a literal "auto" fails at the first step."""
    plan = planned(*two_hosts, "zero=stage3", "zeropp=full", "schedule=warmup_decay")
    assert "auto" not in [value for _, value in leaves(plan.deepspeed)]


def test_building_does_not_change_the_request() -> None:
    """huggingface/transformers#10760: what one build filled in must not reach the next."""
    config = composed("zero=stage3", "zeropp=hpz")
    before = json.dumps(config.deepspeed)
    first = ds_config.build(config, resolve(config.cluster), Batch(1, 2, 4))
    first["optimizer"]["params"]["lr"] = 1.0
    assert json.dumps(config.deepspeed) == before
