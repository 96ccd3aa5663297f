"""Parameter groups and frozen parameters: what the optimizer gets, and what moves.

Run by pytest; engines are those of engine_server.py.
Must never take a setting's word: groups are read back from the engine, frozen weights from checkpoints.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launcher.errors import UserError
from recipes.shared.checkpoint.reader import open_checkpoint
from recipes.shared.groups import group_names, parameter_groups
from recipes.shared.model import from_config
from tests.plan.asking import planned
from tests.train.engines import Engines, request

NORMS = "parameters.groups=[{match: ['*norm*'], weight_decay: 0.0}, {match: ['*embed*'], lr_scale: 0.1}]"


def test_the_first_group_that_matches_takes_a_parameter() -> None:
    plan = planned(
        *request("parameters.groups=[{max_dim: 1, weight_decay: 0.0}, {match: ['*.q_proj.*','*norm*'], lr_scale: 2}]")
    )
    rest, vectors, queries = group_names(plan, from_config(plan))
    assert queries == ["model.layers.0.self_attn.q_proj.weight"]
    assert vectors == [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    ]
    assert "lm_head.weight" in rest or "model.embed_tokens.weight" in rest


@pytest.mark.parametrize("zero", ["stage0", "stage2", "stage3"])
def test_the_engine_has_the_groups_that_were_asked_for(engines: Engines, zero: str) -> None:
    answer = engines.run(planned(*request(f"zero={zero}", NORMS)), 1)
    groups = answer["effective"]["optimizer_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.1]
    assert [group["lr"] for group in groups] == pytest.approx([2e-3, 2e-3, 2e-4])


def test_muon_keeps_the_groups_settings(engines: Engines) -> None:
    answer = engines.run(planned(*request("optim=muon", "zero=stage2", "parameters=no_decay")), 1)
    assert answer["effective"]["optimizer_groups"][-1]["weight_decay"] == 0.0
    assert answer["effective"]["optimizer_groups"][0]["weight_decay"] != 0.0


@pytest.mark.parametrize(("zero", "offload"), [("stage0", "none"), ("stage1", "none"), ("stage3", "cpu")])
def test_frozen_weights_stay_and_the_others_move(engines: Engines, tmp_path: Path, zero: str, offload: str) -> None:
    """Every stage saves them, though DeepSpeed lists them apart only from stage 2 on."""
    frozen = ("parameters.frozen=['*mlp*']", "run.steps=3", "eval.samples=2", "checkpoint.every=1", "checkpoint.keep=0")
    plan = planned(*request(f"zero={zero}", f"offload={offload}", "model.config.vocab_size=256", *frozen))
    engines.run_recipe(plan, tmp_path / "run")
    first, last = (
        {entry.name: entry for entry in open_checkpoint(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")}
        for step in (1, 3)
    )
    assert first.keys() == last.keys()
    for name, entry in last.items():
        assert entry.trainable == ("mlp" not in name), name
        assert first[name].read().equal(entry.read()) == ("mlp" in name), name


def test_a_pattern_that_matches_nothing_is_an_error_by_name() -> None:
    plan = planned(*request("parameters.frozen=['*.adapter.*']"))
    with pytest.raises(UserError, match="no parameter has such a name"):
        parameter_groups(plan, from_config(plan))
    plan = planned(*request("parameters.groups=[{max_dim: 1, weight_decay: 0.0}, {match: ['*norm*'], lr_scale: 0.1}]"))
    with pytest.raises(UserError, match="it takes no trained parameter that a group before it does not take"):
        parameter_groups(plan, from_config(plan))
    plan = planned(*request("parameters.frozen=['*']"))
    with pytest.raises(UserError, match="nothing is left to train"):
        parameter_groups(plan, from_config(plan))


def test_groups_are_part_of_what_a_resumed_run_keeps() -> None:
    from launcher.resume import changed_options

    old = planned(*request()).config
    new = dataclasses.replace(old, parameters=dataclasses.replace(old.parameters, frozen=["*mlp*"]))
    assert [problem.where for problem in changed_options(old, new)] == ["parameters.frozen"]
