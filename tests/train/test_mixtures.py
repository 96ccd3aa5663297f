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
from safetensors.torch import load_file, save_file

from launcher.rundir import RunDir, write_json
from recipes import export
from recipes.shared.checkpoint.reader import open_checkpoint
from recipes.shared.leaf_modules import mark_leaf_modules
from recipes.shared.mixtures import is_mixture
from recipes.shared.model import from_config
from recipes.shared.pretrained import load_whole
from tests.plan.asking import planned, refuses
from tests.train.engines import TRAIN, Engines, request
from tests.train.test_export_job import request as export_request

SMALL: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
BLOCKS = {"mixtral": "MixtralSparseMoeBlock", "qwen3_moe": "Qwen3MoeSparseMoeBlock"}
STILL = ("run.steps=1", "schedule=constant", "deepspeed.optimizer.params.lr=0.0", "eval.samples=2", "eval.every=0")
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


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("zero", ["stage0", "stage3"])
def test_weights_that_are_stored_expert_by_expert_are_begun_with(
    engines: Engines, tmp_path: Path, kind: str, zero: str
) -> None:
    """Hugging Face writes experts apart and holds them in one tensor; both are read."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = from_config(planned(*family(kind)))
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]  # a Hugging Face model has it
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(".experts.3." in name for name in stored) == 3
    begun = {}
    for number in (1, 2):
        folder = tmp_path / ("model" if number == 1 else "out")
        plan = planned(*TRAIN, "model=hf", f"model.init_from={folder}", f"zero={zero}", *STILL)
        engines.run_recipe(plan, tmp_path / f"run{number}")
        step = tmp_path / f"run{number}" / "checkpoints" / "step_00000001"
        begun[number] = {entry.name: entry.read() for entry in open_checkpoint(step)}
        if number == 1:
            write_json(RunDir(tmp_path / "run1").plan, plan.to_json())
            staging = Path(export.run_job(export_request(tmp_path / "run1", tmp_path / "unnamed"))["staging"])
            staging.rename(tmp_path / "out")
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for found in begun.values():
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())


def test_an_expert_that_is_missing_in_the_folder_is_an_error_by_name(tmp_path: Path) -> None:
    model = from_config(planned(*family("mixtral")))
    model.save_pretrained(tmp_path)  # type: ignore[operator]  # a Hugging Face model has it
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if ".experts.3." not in k}, tmp_path / "model.safetensors")
    with refuses("experts.gate_up_proj [3, 96, 32] for [4, 96, 32]"):
        load_whole(model, tmp_path)


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
