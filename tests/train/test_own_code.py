"""Models, data and recipes of the user's own: trained at every stage, evaluated, exported, and refused by name.

Run by pytest: the example in examples/ and stranger ones, in ranks that the engine server forks; one real launch.
Must never trust a loss alone where a tensor can be compared.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.measured import profile_request
from launcher.rundir import RunDir, write_json
from recipes import check_export, custom, export
from recipes.shared import profile
from recipes.shared.checkpoint import manifest
from recipes.shared.checkpoint.fixed_batch import SAMPLES
from recipes.shared.data.splits import open_splits
from recipes.shared.own_code import make_model
from recipes.shared.own_losses import Own
from tests.plan.asking import ROOT, composed, planned, refused, refuses
from tests.train.engines import Engines
from tests.train.running import launch, losses, records
from tests.train.test_export_job import plan_json
from tests.train.test_export_job import request as export_request

SOURCE = ROOT / "examples" / "tabular"
EXAMPLE = (
    *("model=custom", "model.target=tabular.Tabular", "model.config.width=16"),
    *("data=custom", "data.target=tabular.splits", f"run.source={SOURCE}", "cluster.num_procs=2"),
)
SHORT = ("train.micro_batch_size=4", "run.steps=8", "eval.samples=12", "eval.every=0", "schedule=constant")
OWN = ("data=custom", "data.target=tests.train.own_models.vectors", "cluster.num_procs=2", *SHORT)
RELATIVE = 1e-5  # of a loss in fp32: the same sums in another order


def own(name: str) -> tuple[str, ...]:
    """The request for a model of own_models.py."""
    return ("model=custom", f"model.target=tests.train.own_models.{name}", *OWN)


@pytest.fixture(scope="module")
def trained(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of the example, by stage."""
    folder, found = tmp_path_factory.mktemp("example"), {}
    for zero in ("stage0", "stage1", "stage2", "stage3"):
        plan = planned(*EXAMPLE, *SHORT, f"zero={zero}")
        found[zero] = folder / zero
        engines.run_recipe(plan, found[zero])
        write_json(RunDir(found[zero]).plan, plan.to_json())
    return found


@pytest.mark.parametrize("zero", ["stage1", "stage2", "stage3"])
def test_the_example_trains_alike_at_every_stage(trained: dict[str, Path], zero: str) -> None:
    first = losses(trained["stage0"])
    assert first[-1] < first[0]
    assert losses(trained[zero]) == pytest.approx(first, rel=RELATIVE)
    evaluated = [record["eval_loss"] for record in records(trained["stage0"]) if "eval_loss" in record]
    assert [r["eval_loss"] for r in records(trained[zero]) if "eval_loss" in r] == pytest.approx(
        evaluated, rel=RELATIVE
    )


def exported(run: Path, target: Path) -> dict[str, Any]:
    """The answer of the export's job; the files lie in its `staging`."""
    return export.run_job(export_request(run, target))


def test_the_example_goes_on_in_another_layout(engines: Engines, trained: dict[str, Path], tmp_path: Path) -> None:
    """Its scalar, its shared parameter and its buffers, from shards of two ranks to one rank and another stage."""
    curves = {}
    for before, after, layout in (
        ("stage0", "stage0", ("cluster.num_procs=2", "train.micro_batch_size=4")),
        ("stage3", "stage1", ("cluster.num_procs=1", "train.micro_batch_size=8")),
        ("stage0", "stage3", ("cluster.num_procs=2", "train.micro_batch_size=4")),
    ):
        plan = planned(*EXAMPLE[:-1], *SHORT[1:], *layout, f"zero={after}", "run.steps=10")
        step = trained[before] / "checkpoints" / "step_00000008"
        engines.run_recipe(dataclasses.replace(plan, resume_from=str(step)), tmp_path / f"{before}-{after}")
        curves[before, after] = losses(tmp_path / f"{before}-{after}")
    expected = curves.pop(("stage0", "stage0"))
    assert len(expected) == 2
    for found in curves.values():
        assert found == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize("zero", ["stage0", "stage3"])
def test_an_export_holds_tensors_and_what_made_the_model(trained: dict[str, Path], tmp_path: Path, zero: str) -> None:
    run = trained[zero]
    answer = exported(run, tmp_path / "out")
    folder = Path(answer["staging"])
    assert json.loads((folder / "model.json").read_text()) == {"target": "tabular.Tabular", "config": {"width": 16}}
    assert not (folder / "config.json").exists() and answer["described"]
    spec = importlib.util.spec_from_file_location("tabular_again", SOURCE / "tabular.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.Tabular(width=16)
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert unexpected == [] and missing == ["second.gain"]  # the same parameter as first.gain, and stored once
    assert model.second.gain is model.first.gain and model.offsets.dtype == torch.int64
    rows = {name: torch.from_numpy(array) for name, array in module.splits()[1].batch(np.arange(SAMPLES)).items()}
    saved = manifest.read(run / "checkpoints" / "step_00000008")
    assert saved is not None
    with torch.no_grad():
        assert float(model(**rows)["loss"]) == pytest.approx(saved["fixed_batch_loss"], rel=RELATIVE)
    request = {"plan": plan_json(run), "folder": str(folder), "expected": saved["fixed_batch_loss"], "dtype": "fp32"}
    assert "loss" in check_export.run_job(request | {"bytes": answer["bytes"]})


def test_buffers_read_at_stage_3_are_those_of_the_folder_on_every_rank(
    engines: Engines, trained: dict[str, Path], tmp_path: Path
) -> None:
    """huggingface/transformers#45402: buffers are not partitioned, and were skipped."""
    tensors = load_file(Path(exported(trained["stage3"], tmp_path / "out")["staging"]) / "model.safetensors")
    tensors |= {"offsets": torch.tensor([0, 6, 11]), "mean": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    (tmp_path / "given").mkdir()
    save_file(tensors, tmp_path / "given" / "model.safetensors")
    plan = planned(*EXAMPLE, *SHORT, "zero=stage3", f"model.init_from={tmp_path / 'given'}")
    answer = engines.call("tests.train.own_ranks:built", 2, plan=plan.to_json())
    for rank in answer["ranks"]:
        assert rank["whole"] == []
        assert rank["buffers"] == {n: tensors[n].tolist() for n in ("offsets", "mean", "deviation")}
    assert answer["ranks"][0]["values"] == answer["ranks"][1]["values"]


ONE_ROW = ("train.micro_batch_size=1", "train.gradient_accumulation_steps=2")


@pytest.mark.parametrize(("model", "stages"), [("IdleExperts", (1, 3)), ("UsedOutside", (2, 3))])
def test_idle_experts_and_parameters_used_outside_change_nothing(
    engines: Engines, tmp_path: Path, model: str, stages: tuple[int, ...]
) -> None:
    """deepspeedai/DeepSpeed#7998, deepspeedai/DeepSpeed#930. One row a rank: most experts are idle on each."""
    for stage in (0, *stages):
        engines.run_recipe(planned(*own(model), *ONE_ROW, f"zero=stage{stage}"), tmp_path / str(stage))
    expected = losses(tmp_path / "0")
    for stage in stages:
        assert losses(tmp_path / str(stage)) == pytest.approx(expected, rel=RELATIVE), stage
    effective = json.loads((tmp_path / "3" / "effective.json").read_text())
    assert effective["leaf_modules"] == (["Experts"] if model == "IdleExperts" else [])


def test_a_module_that_is_named_may_be_used_in_part(engines: Engines, tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed#7998: head B is called on one rank alone."""
    named = (*own("TwoHeads"), *ONE_ROW, "model.leaf_modules=[Choice]")
    for stage in (0, 1, 3):
        engines.run_recipe(planned(*named, f"zero=stage{stage}"), tmp_path / str(stage))
    expected = losses(tmp_path / "0")
    assert losses(tmp_path / "1") == pytest.approx(expected, rel=RELATIVE)
    assert losses(tmp_path / "3") == pytest.approx(expected, rel=RELATIVE)


def test_stage_2_stops_where_ranks_use_different_modules(engines: Engines, tmp_path: Path) -> None:
    """It would go on with sums of gradients of different heads, and a loss that looks like one."""
    with pytest.raises(AssertionError, match="gradients of different parameters"):
        engines.run_recipe(planned(*own("TwoHeads"), *ONE_ROW, "zero=stage2"), tmp_path / "run")
    assert losses(tmp_path / "run") == []


def test_experts_that_may_be_idle_are_refused_at_stage_2(engines: Engines, tmp_path: Path) -> None:
    """It gave a loss that differed from stage 0's by two per cent after eight steps."""
    with pytest.raises(AssertionError, match=r"use zero=stage1 or zero=stage3"):
        engines.run_recipe(planned(*own("IdleExperts"), *ONE_ROW, "zero=stage2"), tmp_path / "run")


@pytest.mark.parametrize(
    "model", [("tabular.Tabular", EXAMPLE), ("tests.train.own_models.UsedOutside", own("UsedOutside"))]
)
def test_losses_of_samples_are_those_of_batches_of_one(model: tuple[str, tuple[str, ...]]) -> None:
    """By the module's own method, and one at a time where it has none."""
    target, request = model
    batch = {n: torch.from_numpy(a) for n, a in open_splits(planned(*request)).validation.batch(np.arange(5)).items()}
    torch.manual_seed(3)
    module = make_model(target, str(SOURCE), {})
    with torch.no_grad():
        found = Own().sample_losses(module, batch)
        alone = [float(Own().loss(module, {n: v[i : i + 1] for n, v in batch.items()})) for i in range(5)]
    assert found.tolist() == pytest.approx(alone, abs=1e-6) and len(set(alone)) == 5
    assert "forward" not in vars(module)


def test_the_size_is_counted_without_storing_anything_where_the_code_allows() -> None:
    def counted(target: str, **arguments: int) -> Any:
        model = dataclasses.replace(composed(*EXAMPLE).model, target=target, config=arguments)
        config = dataclasses.replace(composed(*EXAMPLE), model=model)
        answer = profile.run_job(profile_request(config, 1, "fp32", None))
        assert answer["timeline"] is None and answer["why"]
        return answer["parameters"]

    model = make_model("tabular.Tabular", str(SOURCE), {"width": 16})
    assert counted("tabular.Tabular", width=16) == sum(parameter.numel() for parameter in model.parameters())
    assert counted("tests.train.own_models.LooksAtValues") is None
    with refuses("model.config", "wdith"):
        counted("tabular.Tabular", wdith=16)


def test_code_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def problem(*overrides: str) -> Any:
        (found,) = refused(*EXAMPLE, *overrides)
        return found

    typo = problem("model.target=tabular.Tabulra")
    assert typo.where == "model.target" and typo.fix == "model.target=tabular.Tabular"
    assert problem("data.target=tabulra.splits").why.startswith("there is no module tabulra in")
    assert "MODULE.NAME" in problem("model.target=Tabular").why
    assert problem(f"run.source={tmp_path / 'nothing'}").where == "run.source"
    (unread,) = refused(f"run.source={SOURCE}")
    assert unread.where == "run.source" and "ignored" in unread.why


def test_samples_that_can_only_be_iterated_over_are_refused() -> None:
    """Lightning-AI/pytorch-lightning#13498: ranks with different numbers of batches hang at the epoch's end."""
    plan = planned(*own("UsedOutside"), "data.target=tests.train.own_models.stream")
    with refuses("data.target", "not found by number", "__len__"):
        open_splits(plan)


def test_a_forward_without_a_loss_is_an_error_that_says_what_is_wanted() -> None:
    plan = planned(*own("NoLoss"))
    batch = {n: torch.from_numpy(a) for n, a in open_splits(plan).training.batch(np.arange(2)).items()}
    with refuses("the model's forward", "[2, 1]", "mean loss of the batch"):
        Own().loss(make_model("tests.train.own_models.NoLoss", None, {}), batch)


def test_a_recipe_of_ones_own_is_called_with_the_plan_and_the_run_folder(tmp_path: Path) -> None:
    target = "tests.train.own_models.recipe"
    plan = planned("recipe=custom", f"recipe.target={target}")
    custom.run(plan, RunDir(tmp_path))
    assert (tmp_path / "word").read_text() == target


def test_the_example_runs_from_the_command_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = launch(*EXAMPLE, *SHORT, "zero=stage3", "cluster.accelerator=cpu", f"run.dir={run}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "final validation loss" in done.stdout and "nats" not in done.stdout
    assert len(losses(run)) == 8
    again = launch("mode=plan", "recipe=resume", f"run.dir={run}", "run.steps=9", "plan.format=json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["config"]["run"]["source"] == str(SOURCE)
