"""Encoder-decoders: trained on halves of windows, with one embedding under several names, at every stage and layout.

Run by pytest: the recipe as its workers run it, in ranks that the engine server forks.
Must never trust our own names: Hugging Face loads what is exported.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher.rundir import RunDir, write_json
from recipes import check_export, export
from recipes.shared.checkpoint import manifest
from recipes.shared.checkpoint.reader import open_checkpoint
from recipes.shared.data.splits import open_splits
from recipes.shared.data.windows import Halves
from recipes.shared.losses import Seq2Seq
from recipes.shared.model import from_config
from recipes.shared.objective import objective_of
from tests.plan.asking import planned, refuses
from tests.train.engines import Engines, unjudged
from tests.train.running import losses
from tests.train.test_export_job import plan_json
from tests.train.test_export_job import request as export_request

FIELDS: dict[str, Any] = {"model_type": "t5", "vocab_size": 256, "d_model": 32, "d_kv": 8, "d_ff": 48}
FIELDS |= {"num_layers": 1, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
T5 = (
    "train.sequence_length=16",
    "cluster.num_procs=2",
    "model=hf",
    *(f"model.config.{name}={value}" for name, value in FIELDS.items()),
)
SHORT = (
    "run.steps=4",
    "checkpoint.every=2",
    "checkpoint.keep=0",
    "eval.samples=4",
    "eval.every=0",
    "train.global_batch_size=4",
)
TIED = {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}


def test_a_window_is_read_to_its_half_and_the_rest_is_written() -> None:
    plan = planned(*T5, "train.sequence_length=7")
    halves = open_splits(plan).validation
    assert isinstance(halves, Halves)
    two = np.array([1, 0])
    batch, tokens = halves.batch(two), halves.windows.tokens(two)
    assert batch["input_ids"].shape == (2, 3) and batch["labels"].shape == (2, 4)
    assert np.array_equal(np.concatenate([batch["input_ids"], batch["labels"]], axis=1), tokens)
    assert halves.weights(two).tolist() == [4.0, 4.0]


def test_labels_are_not_shifted_and_sample_losses_average_to_the_loss() -> None:
    """The model's own loss of the same labels is the reference; -100 counts for nothing."""
    plan = planned(*T5)
    torch.manual_seed(1)
    model = from_config(plan).eval()
    objective = objective_of(plan)
    assert isinstance(objective, Seq2Seq)
    tokens = torch.randint(1, 256, (3, 8))
    labels = torch.where(torch.arange(8) < torch.tensor([[8], [5], [2]]), tokens, -100)
    batch = {"input_ids": tokens, "labels": labels}
    with torch.no_grad():
        found, whole = objective.sample_losses(model, batch), objective.loss(model, batch)
        alone = [model(input_ids=tokens[[n]], labels=labels[[n]]).loss for n in range(3)]
    assert found.tolist() == pytest.approx([float(loss) for loss in alone], rel=1e-6)
    counts = torch.tensor([8.0, 5.0, 2.0])
    assert float((found * counts).sum() / counts.sum()) == pytest.approx(float(whole), rel=1e-6)


def test_conversations_are_refused() -> None:
    chat = ("recipe=finetune", "data=chat", "data.tokenizer=/t", "data.files=[/c.jsonl]", "model.init_from=/m")
    with refuses("would read the responses"):
        open_splits(unjudged(*T5, *chat))


def test_a_configuration_without_a_first_token_of_the_decoder_is_refused() -> None:
    without = [option for option in T5 if "decoder_start" not in option]
    with refuses("model.config.decoder_start_token_id"):
        from_config(planned(*without))


def test_one_embedding_under_several_names_is_saved_resumed_elsewhere_and_exported(
    engines: Engines, tmp_path: Path
) -> None:
    """The names are tied at stage 3, on other ranks and stages, and in Hugging Face's hands."""
    from transformers import AutoModelForSeq2SeqLM

    curves = {}
    for zero in ("stage0", "stage3"):
        plan = planned(*T5, *SHORT, f"zero={zero}")
        engines.run_recipe(plan, tmp_path / zero)
        curves[zero] = losses(tmp_path / zero)
    assert curves["stage3"] == pytest.approx(curves["stage0"], rel=1e-5)
    half = tmp_path / "stage3" / "checkpoints" / "step_00000002"
    stored = open_checkpoint(half)
    assert {*stored.tied, *stored.tied.values()} <= TIED
    assert len([entry for entry in stored if entry.name in TIED]) == 1
    for number, (zero, ranks) in enumerate([("stage3", 1), ("stage1", 2)]):
        plan = planned(*T5, *SHORT, f"zero={zero}", f"cluster.num_procs={ranks}")
        run = tmp_path / f"resumed{number}"
        engines.run_recipe(dataclasses.replace(plan, resume_from=str(half)), run)
        assert losses(run) == pytest.approx(curves["stage0"][2:], rel=1e-5)
    run = tmp_path / "stage3"
    write_json(RunDir(run).plan, planned(*T5, *SHORT, "zero=stage3").to_json())
    answer = export.run_job(export_request(run, tmp_path / "out"))
    model, info = AutoModelForSeq2SeqLM.from_pretrained(answer["staging"], output_loading_info=True)
    assert not any(info.values())
    assert model.lm_head.weight is model.shared.weight and model.decoder.embed_tokens.weight is model.shared.weight
    expected = manifest.read(run / "checkpoints" / "step_00000004")["fixed_batch_loss"]  # type: ignore[index]
    request = {"plan": plan_json(run), "folder": answer["staging"], "expected": expected, "dtype": "fp32"}
    assert "loss" in check_export.run_job(request | {"bytes": answer["bytes"]})
