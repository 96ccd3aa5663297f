"""A run that goes on with another world size, stage or offload is the run that went on as it was.

Run by pytest: real runs of the product; masters and moments are compared in files, losses in metrics.jsonl.
Must never compare a checkpoint with itself: the one that is read was saved by the resumed run, or by the other layout.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from recipes.shared.checkpoint import manifest
from recipes.shared.checkpoint.reader import open_checkpoint, open_optimizer
from tests.train.running import Runs, launch, losses, steps

# The learning rate is constant and runs end at 10 or 20 steps: a schedule would not be the same curve.
BASE = ("schedule=constant", "checkpoint.every=10", "checkpoint.keep=0", "run.steps=20")
RELATIVE = 1e-5


def source(runs: Runs, ranks: int, zero: str, offload: str = "none") -> Path:
    """A run of 20 steps with checkpoints at 10 and 20, and a global batch of 12."""
    return runs.get(
        *BASE,
        f"zero={zero}",
        f"offload={offload}",
        f"cluster.num_procs={ranks}",
        "train.micro_batch_size=null",
        "train.gradient_accumulation_steps=1",
        "train.global_batch_size=12",
    )


def copied(run: Path, target: Path) -> Path:
    """The run as it stood after its tenth step."""
    shutil.copytree(run, target)
    shutil.rmtree(target / "checkpoints" / "step_00000020")
    (target / "checkpoints" / "latest").write_text("step_00000010")
    return target


# Through the launcher; every other change: test_elastic_matrix.py.
CHANGES = [
    ((2, "stage3", "none"), (3, "stage2", "cpu")),
    ((4, "stage2", "none"), (2, "stage1", "none")),
]


@pytest.mark.parametrize(("old", "new"), CHANGES, ids=lambda layout: "-".join(map(str, layout)))
def test_the_next_losses_are_those_of_the_uninterrupted_run(
    runs: Runs, tmp_path: Path, old: tuple[int, str, str], new: tuple[int, str, str]
) -> None:
    """deepspeedai/DeepSpeed#6441, #7599, ymcui/Chinese-LLaMA-Alpaca#711: refused, or wrong in silence."""
    whole = source(runs, *old)
    run = copied(whole, tmp_path / "run")
    ranks, zero, offload = new
    done = launch("recipe=resume", f"run.dir={run}", f"cluster.num_procs={ranks}", f"zero={zero}", f"offload={offload}")
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads((run / "plan.json").read_text())
    assert plan["world_size"] == ranks and plan["batch"]["global_batch_size"] == 12
    assert [record["step"] for record in steps(run)] == list(range(1, 21))
    assert [record["samples_seen"] for record in steps(run)] == [12 * step for step in range(1, 21)]
    assert losses(run) == pytest.approx(losses(whole), rel=RELATIVE)
    assert [record["lr"] for record in steps(run)] == [record["lr"] for record in steps(whole)]
    # What it saves is a whole checkpoint of the new layout, with the same masters and moments.
    mine, theirs = (folder / "checkpoints" / "step_00000020" for folder in (run, whole))
    ours, reference = ({entry.name: entry.read() for entry in open_checkpoint(folder)} for folder in (mine, theirs))
    assert ours.keys() == reference.keys()
    for name, tensor in reference.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-4, atol=1e-6), name
    now, then = open_optimizer(mine), open_optimizer(theirs)
    assert now.step == then.step == 20 and now.moments.keys() == then.moments.keys() == {"exp_avg", "exp_avg_sq"}


def test_masters_and_moments_agree_one_step_after_the_load(runs: Runs, tmp_path: Path) -> None:
    """Against the same step resumed as it was: an element that was lost or moved would differ by far more."""
    whole = source(runs, 2, "stage3")
    asit, anew = copied(whole, tmp_path / "as it was"), copied(whole, tmp_path / "anew")
    for run, changes in ((asit, ()), (anew, ("cluster.num_procs=4", "zero=stage1"))):
        done = launch("recipe=resume", f"run.dir='{run}'", "run.steps=11", *changes)
        assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = (run / "checkpoints" / "step_00000011" for run in (anew, asit))
    found = {entry.name: entry.read() for entry in open_checkpoint(ours)}
    for entry in open_checkpoint(theirs):
        assert torch.allclose(found[entry.name], entry.read(), rtol=1e-5, atol=1e-7), entry.name
    now, then = open_optimizer(ours), open_optimizer(theirs)
    assert now.step == then.step == 11
    assert now.moments.keys() == then.moments.keys() == {"exp_avg", "exp_avg_sq"}
    for key, entries in then.moments.items():
        of = {entry.name: entry.read() for entry in now.moments[key]}
        for entry in entries:
            largest = float(entry.read().abs().max())
            assert torch.allclose(of[entry.name], entry.read(), rtol=1e-4, atol=1e-6 * largest), (key, entry.name)


def test_the_batch_keeps_its_size_and_says_so_when_it_cannot(runs: Runs, tmp_path: Path) -> None:
    run = copied(source(runs, 2, "stage2"), tmp_path / "run")
    done = launch("recipe=resume", f"run.dir={run}", "cluster.num_procs=5", "mode=plan")
    assert done.returncode == 2
    assert "train.global_batch_size" in done.stderr and "12" in done.stderr
    done = launch("recipe=resume", f"run.dir={run}", "cluster.num_procs=3", "mode=plan", "plan.format=json")
    assert json.loads(done.stdout)["batch"]["global_batch_size"] == 12


def test_a_model_that_computes_something_else_is_not_trained(runs: Runs, tmp_path: Path) -> None:
    """The loss on the checkpoint's fixed batch is computed again after the load."""
    run = copied(source(runs, 2, "stage2"), tmp_path / "run")
    folder = run / "checkpoints" / "step_00000010"
    saved = manifest.read(folder)
    assert saved["fixed_batch_loss"] > 0
    manifest.write(folder, saved | {"fixed_batch_loss": saved["fixed_batch_loss"] * 1.001})
    done = launch("recipe=resume", f"run.dir={run}")
    assert done.returncode == 5
    assert "on the fixed batch the loss is" in done.stderr
    assert len(steps(run)) == 10
