"""Several objectives of one module and the gradient norms of its parts, against plain PyTorch at every stage.

Run by pytest: recipes as workers run them, on two ranks that the engine server forks.
Must never compare two of our own runs alone: the reference is computed here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.shared.data.order import sample_indices
from tests.plan.asking import planned
from tests.train.engines import Engines
from tests.train.own_models import NumberAndSign, vectors
from tests.train.running import steps

RELATIVE = 1e-5  # of a loss in fp32: sums over ranks in another order
NORM_RELATIVE = 1e-4  # of a gradient's norm, which is a difference of such sums
WEIGHTS = {"number": 0.5, "sign": 2.0}
PARTS = {"number": "number", "sign": "sign", "both": ""}
LR = 0.01
REQUEST = (
    *("model=custom", "model.target=tests.train.own_models.NumberAndSign"),
    *("data=custom", "data.target=tests.train.own_models.vectors"),
    *("train.micro_batch_size=3", "train.gradient_accumulation_steps=2", "cluster.num_procs=2"),
    *("run.steps=3", "eval.every=0", "eval.samples=5", "schedule=constant", "optim=sgd"),
    f"deepspeed.optimizer.params.lr={LR}",
    *("deepspeed.optimizer.params.momentum=0.0", "deepspeed.optimizer.params.weight_decay=0.0"),
    "deepspeed.gradient_clipping=0.0",  # without the key DeepSpeed clips at 1
    "train.objectives={number: 0.5, sign: 2.0}",
    'parameters.norms={number: ["number.*"], sign: ["sign.*"], both: ["*"]}',
)


def reference(seed: int) -> list[dict[str, float]]:
    """Losses, their weighted sum and norms of parts of three steps on whole batches of twelve."""
    torch.manual_seed(seed)
    model, (training, _) = NumberAndSign(), vectors()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    found = []
    for step in range(3):
        batch = training.batch(sample_indices(seed, len(training), 12 * step, 12))
        losses = model(**{name: torch.from_numpy(value) for name, value in batch.items()})["losses"]
        total = sum(WEIGHTS[name] * losses[name] for name in WEIGHTS)
        optimizer.zero_grad()
        total.backward()
        record = {"loss": total.item()} | {f"loss/{name}": value.item() for name, value in losses.items()}
        for part, start in PARTS.items():
            gradients = [p.grad for name, p in model.named_parameters() if name.startswith(start)]
            record[f"grad_norm/{part}"] = float(torch.nn.utils.get_total_norm(gradients))
        found.append(record)
        optimizer.step()
    return found


def evaluation(run: Path) -> float:
    """The last evaluation's loss."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([record["eval_loss"] for record in records if "eval_loss" in record][-1])


@pytest.mark.parametrize("zero", ["stage0", "stage2", "stage3"])
def test_losses_and_norms_of_parts_are_those_of_plain_pytorch(engines: Engines, tmp_path: Path, zero: str) -> None:
    plan = planned(*REQUEST, f"zero={zero}", "+deepspeed.zero_allow_untested_optimizer=true")
    engines.run_recipe(plan, tmp_path)
    for record, right in zip(steps(tmp_path), reference(plan.config.run.seed), strict=True):
        for name, value in right.items():
            near = NORM_RELATIVE if "norm" in name else RELATIVE
            assert record[name] == pytest.approx(value, rel=near), name
        assert record["grad_norm/both"] == pytest.approx(record["grad_norm"], rel=NORM_RELATIVE)


def test_an_evaluation_is_of_the_weighted_sum(engines: Engines, tmp_path: Path) -> None:
    plan = planned(*REQUEST, "zero=stage0", "run.steps=1", "deepspeed.optimizer.params.lr=1e-12")
    engines.run_recipe(plan, tmp_path)
    torch.manual_seed(plan.config.run.seed)
    model, (_, validation) = NumberAndSign(), vectors()
    batch = validation.batch(np.arange(5))
    losses = model(**{name: torch.from_numpy(value) for name, value in batch.items()})["losses"]
    right = sum(WEIGHTS[name] * float(losses[name]) for name in WEIGHTS)
    assert evaluation(tmp_path) == pytest.approx(right, rel=RELATIVE)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("train.objectives={number: 1.0}", "sign"),
        ("train.objectives={number: 1.0, sign: 1.0, dwell: 1.0}", "dwell"),
        ("train.objectives={}", "a scalar"),
        ('parameters.norms={tail: ["tail.*"]}', "no trained parameter fits"),
    ],
)
def test_what_does_not_match_is_an_error_by_name(engines: Engines, tmp_path: Path, option: str, message: str) -> None:
    given: list[Any] = [text for text in REQUEST if text.partition("=")[0] != option.partition("=")[0]]
    with pytest.raises(AssertionError, match=message):
        engines.run_recipe(planned(*given, option, "zero=stage0"), tmp_path)
