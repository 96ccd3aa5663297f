"""Every stage and offload computes what plain PyTorch computes, from the same initial weights."""

from __future__ import annotations

import pytest
import torch

from launcher.plan import read_plan
from recipes.shared.checkpoint.reader import open_checkpoint
from tests.train.plain import initial_model, plain_losses, scheduled_lr
from tests.train.running import Runs, losses, steps

FP32_RELATIVE = 1e-5  # sums over ranks and micro-batches are taken in another order
# zero, offload; the first entry of each model is where the plain loop's plan is taken from
SETUPS = [
    ("stage0", "none"),
    ("stage1", "none"),
    ("stage2", "none"),
    ("stage3", "none"),
    ("stage2", "cpu"),
    ("stage3", "cpu"),
    ("stage3", "cpu_all"),
]
MODELS = {"tied": "true", "untied": "false"}


def overrides(tied: str, zero: str, offload: str) -> tuple[str, ...]:
    """The parity run: 20 optimizer steps, a checkpoint after each."""
    return (
        f"model.config.tie_word_embeddings={tied}",
        f"zero={zero}",
        f"offload={offload}",
        "run.steps=20",
        "checkpoint.every=1",  # the first one holds the initial weights
        "checkpoint.keep=0",
    )


@pytest.fixture(scope="module")
def plain(runs: Runs) -> dict[str, list[float]]:
    """Losses of the plain loop for each model."""
    return {name: plain_losses(runs.get(*overrides(tied, *SETUPS[0]))) for name, tied in MODELS.items()}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("zero", "offload"), SETUPS)
def test_fp32_losses_equal_plain_pytorch(
    runs: Runs, plain: dict[str, list[float]], model: str, zero: str, offload: str
) -> None:
    found = losses(runs.get(*overrides(MODELS[model], zero, offload)))
    assert len(found) == 20
    assert found == pytest.approx(plain[model], rel=FP32_RELATIVE, abs=0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("zero", "offload"), SETUPS)
def test_initial_weights_equal_plain_construction_bit_for_bit(runs: Runs, model: str, zero: str, offload: str) -> None:
    """The first step's learning rate is 0, so the checkpoint after it holds the initial weights."""
    run = runs.get(*overrides(MODELS[model], zero, offload))
    plan = read_plan(run / "plan.json")
    assert scheduled_lr(plan, 1) == steps(run)[0]["lr"] == 0.0
    expected = dict(initial_model(plan).named_parameters())
    found = {
        entry.name: entry.read() for entry in open_checkpoint(run / "checkpoints" / "step_00000001") if entry.trainable
    }
    found = {name: tensor for name, tensor in found.items() if name in expected}
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter.detach()), name


def test_logged_learning_rate_is_the_one_used(runs: Runs) -> None:
    """huggingface/accelerate#2124: the first step uses the start of the warm-up, and says so."""
    run = runs.get(*overrides("true", "stage2", "none"))
    plan = read_plan(run / "plan.json")
    assert [record["lr"] for record in steps(run)] == pytest.approx(
        [scheduled_lr(plan, step) for step in range(1, 21)], rel=1e-12
    )


def test_gradient_norm_is_logged_and_equal_at_every_stage(runs: Runs) -> None:
    curves = [
        [record["grad_norm"] for record in steps(runs.get(*overrides("true", zero, offload)))]
        for zero, offload in SETUPS
    ]
    assert all(norm > 0 for norm in curves[0])
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-4)


def test_samples_seen_and_tokens_are_counted_over_all_ranks(runs: Runs) -> None:
    run = runs.get(*overrides("true", "stage0", "none"))
    assert [record["samples_seen"] for record in steps(run)] == [8 * step for step in range(1, 21)]
