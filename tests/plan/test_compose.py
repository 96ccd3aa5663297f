"""Claims about composing: conf/ as a whole, and what overrides do to a request.

Run by pytest; refused requests are in test_refusals.py.
Must never start a run: requests are composed and planned.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import cli as front_door
from launcher.plan import Plan
from launcher.run import Outcome
from tests.plan.asking import (
    COMBINATIONS,
    CONF,
    broken_rules,
    chosen,
    combination,
    composed,
    leaves,
    planned,
    raw,
    refused,
)

FILES = {
    "activation": 3,
    "audit": 3,
    "checkpoint": 2,
    "cluster": 3,
    "data": 7,
    "experiment": 2,
    "hardware": 7,
    "model": 17,
    "offload": 5,
    "optim": 6,
    "parameters": 2,
    "peft": 2,
    "precision": 3,
    "recipe": 6,
    "schedule": 3,
    "tracker": 2,
    "zero": 5,
    "zeropp": 5,
}
CHOICES = [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml"))]
GPT2 = '{"model_type": "gpt2", "vocab_size": 256, "n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 2}'


def needs(group: str, choice: str, folder: Path) -> list[str]:
    """The overrides without which a choice is not complete, or not honoured."""
    (folder / "config.json").write_text(GPT2)
    (folder / "hosts").write_text("alpha slots=2\nbeta slots=2\n")
    two = ["cluster=hostfile", f"cluster.hostfile={folder}/hosts", "cluster.accelerator=cuda"]
    return {
        ("audit", "strict"): ["zero=stage3"],
        ("cluster", "hostfile"): two[1:],
        ("data", "chat"): ["recipe=finetune", "model.init_from=/weights"],
        ("data", "hub"): ["data.path=json"],
        ("data", "custom"): ["data.target=tests.train.own_models.vectors"],
        ("data", "tokens"): ["data.train=/data/train.bin", "data.vocab_size=256"],
        ("model", "custom"): ["model.target=tests.train.own_models.NoLoss"],
        ("model", "hf"): [f"model.path={folder}"],
        ("offload", "cpu_all"): ["zero=stage3"],
        ("offload", "nvme"): ["zero=stage3", "deepspeed.zero_optimization.offload_optimizer.nvme_path=/nvme"],
        ("optim", "lion"): ["offload=cpu"],
        ("recipe", "custom"): ["recipe.target=tests.train.own_models.recipe"],
        ("recipe", "finetune"): ["data=chat", "model.init_from=/weights"],
        ("zeropp", "full"): ["zero=stage3", *two],
        ("zeropp", "hpz"): ["zero=stage3", *two],
        ("zeropp", "qgz"): ["zero=stage3", *two],
        ("zeropp", "qwz"): ["zero=stage3", *two],
    }.get((group, choice), [])


# --- conf/ -----------------------------------------------------------------------------------------------------------


def test_every_file_of_conf_is_discovered() -> None:
    found = {group: sum(1 for name, _ in CHOICES if name == group) for group in dict(CHOICES)}
    assert found == FILES
    assert {path for path in CONF.rglob("*") if path.is_file()} == {
        CONF / "config.yaml",
        *(CONF / group / f"{choice}.yaml" for group, choice in CHOICES),
    }


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_file_of_conf_composes_to_a_plan(
    group: str, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "alpha,beta")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    make = chosen if choice == "auto" else planned
    assert make(f"{group}={choice}", *needs(group, choice, tmp_path)).world_size > 0


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_file_of_conf_opens_with_a_command_that_composes(group: str, choice: str) -> None:
    lines = (CONF / group / f"{choice}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# @package "), "the first line places the file"
    command = re.match(r"# (?:salloc .*)?python launch\.py (.*)", lines[1])
    assert command, f"the second line is the command that uses the file, not {lines[1]!r}"
    words = [word for word in shlex.split(command[1]) if word != "..."]
    assert f"{group}={choice}" in words
    raw(*words)
    assert lines[2].startswith("#"), "the lines after it say what the file changes and costs"


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_no_number_of_conf_is_read_as_text(group: str, choice: str) -> None:
    """huggingface/accelerate#1828: YAML 1.1 reads 1e-5 as text and 1.0e-5 as a number; OmegaConf forgives it."""
    for path, value in leaves(yaml.safe_load((CONF / group / f"{choice}.yaml").read_text(encoding="utf-8"))):
        if isinstance(value, str):
            with pytest.raises(ValueError, match="could not convert"):
                print(path, float(value))


# --- zero x offload x precision --------------------------------------------------------------------------------------


def expected_refusals(stage: int, offload: str, precision: str) -> list[str]:
    rules = []
    if stage == 0 and offload != "none":
        rules.append("offload_optimizer_needs_a_stage")
    if stage < 3 and offload == "cpu_all":
        rules.append("offload_param_needs_stage3")
    if stage < 3 and offload == "nvme":
        rules.append("nvme_needs_stage3")
    if stage == 0 and precision != "fp32":
        rules.append("stage0_reduced_precision_decays_at_start")
    return rules


@pytest.mark.parametrize(("stage", "offload", "precision"), COMBINATIONS)
def test_zero_offload_precision_plans_or_is_refused_by_a_named_rule(stage: int, offload: str, precision: str) -> None:
    request = combination(stage, offload, precision)
    expected = expected_refusals(stage, offload, precision)
    assert broken_rules(*request) == expected
    if expected:
        assert len(refused(*request)) == len(expected)
    else:
        assert planned(*request).deepspeed["zero_optimization"]["stage"] == stage


# --- overrides -------------------------------------------------------------------------------------------------------


def test_a_group_override_replaces_the_groups_fragment() -> None:
    assert planned().deepspeed["zero_optimization"] == {"stage": 2}
    assert planned("zero=stage3").deepspeed["zero_optimization"] == {"stage": 3}
    assert planned("optim=sgd").deepspeed["optimizer"]["type"] == "SGD"


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_deepspeed_key_can_be_set_with_and_without_a_plus(plus: str) -> None:
    new = planned(f"{plus}deepspeed.comms_logger.enabled=true").deepspeed
    assert new["comms_logger"] == {"enabled": True}
    changed = planned(f"{plus}deepspeed.gradient_clipping=0.5").deepspeed
    assert changed["gradient_clipping"] == 0.5


def test_a_group_and_a_key_of_its_block_are_merged() -> None:
    zero = planned("zero=stage3", "+deepspeed.zero_optimization.reduce_bucket_size=5000").deepspeed["zero_optimization"]
    assert zero == {"stage": 3, "reduce_bucket_size": 5000}


def test_free_maps_of_model_and_environment_take_new_keys() -> None:
    config = composed("model.config.rms_norm_eps=1e-6", "+cluster.env.NCCL_DEBUG=INFO")
    assert config.model.config["rms_norm_eps"] == 1e-6
    assert config.cluster.env == {"NCCL_DEBUG": "INFO"}


def test_scientific_notation_on_the_command_line_is_a_number() -> None:
    params = json.loads(json.dumps(planned("deepspeed.optimizer.params.lr=1e-5").deepspeed))["optimizer"]["params"]
    assert params["lr"] == 1e-5


def test_an_experiment_changes_groups_and_options() -> None:
    plan = planned("experiment=llama_1b_stage3", "cluster.num_procs=4")
    assert (plan.config.model.name, plan.config.activation.checkpointing) == ("llama_1b", True)
    assert plan.batch.global_batch_size == 512
    assert plan.deepspeed["optimizer"]["params"] == {
        "lr": 3e-4,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
    }


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(GPT2)
    (tmp_path / "hosts").write_text("alpha slots=1\n")
    monkeypatch.chdir(tmp_path)
    config = composed(
        *("run.dir=runs/a", "export.dir=out", "model=hf", "model.path=.", "cluster=hostfile"),
        *("cluster.hostfile=hosts", "data=text", "data.files=[a.txt,b/*.txt]", "data.tokenizer='~/tokenizer'"),
        *("zero=stage3", "offload=nvme", "deepspeed.zero_optimization.offload_optimizer.nvme_path=swap"),
    )
    assert (config.run.dir, config.run.root) == (f"{tmp_path}/runs/a", f"{tmp_path}/runs")
    assert (config.export.dir, config.model.path) == (f"{tmp_path}/out", str(tmp_path))
    assert config.cluster.hostfile == f"{tmp_path}/hosts"
    assert config.data["files"] == [f"{tmp_path}/a.txt", f"{tmp_path}/b/*.txt"]
    assert config.data["tokenizer"] == f"{Path.home()}/tokenizer"
    assert config.deepspeed["zero_optimization"]["offload_optimizer"]["nvme_path"] == f"{tmp_path}/swap"


def test_a_models_own_config_fills_what_overrides_leave(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(GPT2)
    fields = composed("model=hf", f"model.path={tmp_path}", "+model.config.n_layer=5").model.config
    assert fields == json.loads(GPT2) | {"n_layer": 5}


@pytest.mark.parametrize(
    "value",
    [
        "me@site",
        "/d/p_%r.bin",
        "#1",
        "実験",
        "a=b=c",
        "a b",
        "a,b",
        "a|b",
        "",
        "it's",
        "mlx5_0:1,mlx5_3:1",
        "50%",
        "x;y",
    ],
)
def test_special_characters_survive_in_quotes(value: str) -> None:
    config = composed(f'run.name="{value}"', f'cluster.env.NOTE="{value}"')
    assert config.run.name == value
    assert config.cluster.env == {"NOTE": value}


def test_a_colon_needs_no_quotes() -> None:
    assert composed("+cluster.env.NCCL_IB_HCA=mlx5_0:1").cluster.env == {"NCCL_IB_HCA": "mlx5_0:1"}


# --- interpolation: hydra-ecosystem/hydra#2070 -----------------------------------------------------------------------


def test_interpolations_are_resolved_once_on_the_launcher() -> None:
    named = ("run.name=${now:%H-%M-%S-%f}", "tracker=wandb", "tracker.group=${run.name}")
    plan = planned(*named, "model.name=m${train.sequence_length}")
    text = json.dumps(plan.to_json())
    assert "${" not in text
    assert plan.config.model.name == "m128"
    assert plan.config.tracker.group == plan.config.run.name
    assert Plan.from_json(json.loads(text)) == plan


def test_recorded_overrides_keep_their_interpolation(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[Plan, list[str]]] = []

    def train(plan: Plan, overrides: list[str], sources: dict[str, str]) -> Outcome:
        kept.append((plan, overrides))
        return Outcome(0, None, overrides)

    monkeypatch.setattr(front_door.run, "train", train)
    assert cli("run.name=${run.root}-x", "deepspeed.gradient_clipping=0.5").code == 0
    [(plan, overrides)] = kept
    assert plan.config.run.name == "runs-x"
    assert overrides == ["run.name=${run.root}-x", "++deepspeed.gradient_clipping=0.5"]
