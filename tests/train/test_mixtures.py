"""Mixtures of experts: fetched whole at stage 3, trained like any other model, exported and begun with.

Run by pytest: the recipe as its workers run it, in ranks that the engine server forks.
Must never trust our own names: Hugging Face loads what is exported and writes what is begun with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.shared.leaf_modules import is_mixture, mark_leaf_modules
from recipes.shared.model import from_config
from tests.plan.asking import planned, refuses
from tests.train.engines import TRAIN, Engines, request

SMALL: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
BLOCKS = {"mixtral": "MixtralSparseMoeBlock", "qwen3_moe": "Qwen3MoeSparseMoeBlock"}
SHORT = ("run.steps=2", "eval.samples=4", "eval.every=0", "schedule=constant")


def family(kind: str) -> tuple[str, ...]:
    """The options of a tiny model of `kind`."""
    fields = {"model_type": kind} | SMALL | HEADS | FAMILIES[kind]
    return (*TRAIN, "model=hf", *(f"model.config.{name}={value}" for name, value in fields.items()))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_familys_mixtures_are_found_and_nothing_else(kind: str) -> None:
    model = from_config(planned(*family(kind)))
    assert {type(module).__name__ for module in model.modules() if is_mixture(module)} == {BLOCKS[kind]}
    assert not any(is_mixture(module) for module in from_config(planned(*request())).modules())


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_engine_fetches_mixtures_whole_at_stage_3(engines: Engines, tmp_path: Path, kind: str) -> None:
    engines.run_recipe(planned(*family(kind), *SHORT, "zero=stage3"), tmp_path / "run")
    effective = json.loads((tmp_path / "run" / "effective.json").read_text())
    assert effective["leaf_modules"] == [BLOCKS[kind]]


def test_classes_that_are_named_are_fetched_whole(engines: Engines) -> None:
    answer = engines.run(planned(*request("zero=stage3", "model.leaf_modules=[LlamaMLP]")), 2)
    assert answer["effective"]["leaf_modules"] == ["LlamaMLP"]
    plain = engines.run(planned(*request("zero=stage3")), 2)
    assert answer["losses"] == plain["losses"]


@pytest.mark.parametrize("where", ["model.leaf_modules", "deepspeed.zero_optimization.leaf_module.classes"])
def test_a_class_that_the_model_does_not_have_is_an_error_by_name(where: str) -> None:
    plan = planned(*request("zero=stage3", f"{where}=[LlamaMLQ]"))
    with torch.device("meta"):
        model = from_config(plan)
    with refuses(where, "LlamaMLQ", "LlamaMLP"):
        mark_leaf_modules(plan, model)
