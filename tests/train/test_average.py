"""The moving average of the weights: what it is, that it survives a resume and another layout, and its export.

Run by pytest: recipes as workers run them, in ranks that the engine server forks; averages are read off checkpoints.
Must never compute the expected average from the averages that are tested.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launcher.errors import UserError
from launcher.plan import Plan
from launcher.rundir import RunDir, write_json
from recipes import export
from recipes.shared.checkpoint.reader import open_checkpoint, open_optimizer
from tests.plan.asking import planned
from tests.train.engines import Engines
from tests.train.plain import initial_model
from tests.train.test_export_job import request

DECAY = 0.75
REQUEST = (
    "model.config.hidden_size=48",
    "model.config.intermediate_size=72",
    "model.config.num_hidden_layers=1",
    "model.config.tie_word_embeddings=true",
    "train.sequence_length=32",
    "train.global_batch_size=4",
    "eval.samples=0",
    "schedule=constant",
    "checkpoint.every=1",
    "checkpoint.keep=0",
    f"ema.decay={DECAY}",
)


def plan_of(*layout: str, steps: int = 4) -> Plan:
    """A plan of `steps` steps that keeps an average and every checkpoint."""
    return planned(*REQUEST, f"run.steps={steps}", *layout)


def averages(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Averages in the checkpoint of `step`, by name."""
    state = open_optimizer(run / "checkpoints" / f"step_{step:08d}")
    return {entry.name: entry.read() for entry in state.moments["ema"]}


def expected(plan: Plan, run: Path, step: int) -> dict[str, torch.Tensor]:
    """The average by its definition, from the initial weights and the masters of every checkpoint up to `step`."""
    average = {name: parameter.detach().double() for name, parameter in initial_model(plan).named_parameters()}
    for number in range(1, step + 1):
        for entry in open_checkpoint(run / "checkpoints" / f"step_{number:08d}"):
            if entry.trainable:
                average[entry.name] = DECAY * average[entry.name] + (1 - DECAY) * entry.read().double()
    return average


@pytest.mark.parametrize(
    "layout",
    [
        ("zero=stage0", "cluster.num_procs=1"),
        ("zero=stage1", "cluster.num_procs=2"),
        ("zero=stage2", "cluster.num_procs=2", "offload=cpu"),
        ("zero=stage3", "cluster.num_procs=2"),
        ("zero=stage3", "cluster.num_procs=2", "offload=cpu"),
    ],
    ids=lambda layout: "-".join(layout),
)
def test_it_is_the_average_of_the_weights_at_every_stage(
    engines: Engines, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """deepspeedai/DeepSpeed#2056: a copy of a partitioned model is empty. OpenRLHF/OpenRLHF#1357: it stayed at zero."""
    plan = plan_of(*layout)
    engines.run_recipe(plan, tmp_path)
    found, right = averages(tmp_path, 4), expected(plan, tmp_path, 4)
    assert found.keys() == right.keys() and len(found) > 5
    for name, tensor in found.items():  # four steps of fp32 rounding
        torch.testing.assert_close(tensor.double(), right[name], rtol=1e-5, atol=1e-7)
        assert tensor.abs().sum() > 0, name


@pytest.mark.parametrize(
    "new",
    [
        ("zero=stage3", "cluster.num_procs=2"),
        ("zero=stage2", "cluster.num_procs=1"),
        ("zero=stage0", "cluster.num_procs=1"),
    ],
    ids=lambda layout: "-".join(layout),
)
def test_a_resumed_run_goes_on_with_it(engines: Engines, tmp_path: Path, new: tuple[str, ...]) -> None:
    """The average after four steps is that of a run that never stopped, in the same layout or in another."""
    old = ("zero=stage3", "cluster.num_procs=2")
    engines.run_recipe(plan_of(*old), tmp_path / "whole")
    source = tmp_path / "whole" / "checkpoints" / "step_00000002"
    engines.run_recipe(dataclasses.replace(plan_of(*new), resume_from=str(source)), tmp_path / "resumed")
    found, right = averages(tmp_path / "resumed", 4), averages(tmp_path / "whole", 4)
    assert found.keys() == right.keys()
    for name, tensor in found.items():  # the same sums in another order, over two steps
        torch.testing.assert_close(tensor, right[name], rtol=1e-4, atol=1e-6)


def test_a_run_that_goes_on_without_it_saves_none(engines: Engines, tmp_path: Path) -> None:
    layout = ("zero=stage2", "cluster.num_procs=1")
    engines.run_recipe(plan_of(*layout, steps=1), tmp_path / "with")
    source = tmp_path / "with" / "checkpoints" / "step_00000001"
    assert "ema" in open_optimizer(source).moments
    for name, changed in (("same", layout), ("other", ("zero=stage3", "cluster.num_procs=1"))):
        plan = plan_of(*changed, "ema.decay=null", steps=2)
        engines.run_recipe(dataclasses.replace(plan, resume_from=str(source)), tmp_path / name)
        saved = open_optimizer(tmp_path / name / "checkpoints" / "step_00000002")
        assert sorted(saved.moments) == ["exp_avg", "exp_avg_sq"]


def test_an_export_of_it_holds_the_averages_and_no_other_run_has_one(engines: Engines, tmp_path: Path) -> None:
    run, layout = tmp_path / "run", ("zero=stage3", "cluster.num_procs=2")
    plan = plan_of(*layout, steps=2)
    engines.run_recipe(plan, run)
    write_json(RunDir(run).plan, plan.to_json())
    answer = export.run_job(request(run, tmp_path / "export", weights="ema", max_shard_bytes=10**9))
    written = load_file(Path(answer["staging"]) / "model.safetensors")
    right = averages(run, 2)
    assert written.keys() == right.keys()
    assert all(torch.equal(written[name], right[name]) for name in right)
    assert answer["provenance"]["weights"] == "ema" and answer["provenance"]["fixed_batch_loss"] is None

    without = tmp_path / "without"
    plain = planned(*[option for option in REQUEST if "ema" not in option], *layout, "run.steps=1")
    engines.run_recipe(plain, without)
    write_json(RunDir(without).plan, plain.to_json())
    with pytest.raises(UserError, match="no moving average of model"):
        export.run_job(request(without, tmp_path / "none", weights="ema"))
