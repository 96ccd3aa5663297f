"""Every change of world size and stage, with and without offload: what is loaded, and the losses that follow.

Run by pytest: the recipe as its workers run it, in ranks that the engine server forks. Two parameter groups, tied
weights and a frozen norm throughout: the forms in which layouts differ most.
Must never compare a checkpoint with itself: the one that is read was saved by the engine it was loaded into.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from launcher.plan import Plan
from recipes.shared.checkpoint.reader import open_checkpoint, open_optimizer
from tests.plan.asking import planned
from tests.train.engines import Engines
from tests.train.running import Runs, losses, steps

RELATIVE = 1e-5  # of a loss: the same sums in another order, over ten steps
REQUEST = (
    "model.config.hidden_size=48",
    "model.config.intermediate_size=72",
    "model.config.num_hidden_layers=2",
    "model.config.tie_word_embeddings=true",
    "parameters=no_decay",
    'parameters.frozen=["model.norm.weight"]',
    "train.sequence_length=32",
    "train.gradient_accumulation_steps=1",
    "train.global_batch_size=12",
    "eval.every=0",
    "eval.samples=4",
    "run.steps=20",
    "checkpoint.every=10",
    "checkpoint.keep=0",
    "deepspeed.zero_optimization.sub_group_size=6000",
)
Layout = tuple[int, str, str]
SIZES = ((2, 1), (2, 4), (4, 2), (2, 3), (3, 2))
STAGES = (("stage3", "stage2"), ("stage2", "stage3"), ("stage1", "stage3"), ("stage3", "stage0"), ("stage0", "stage3"))
OFFLOADS = ("none", "cpu")


def changes() -> list[tuple[Layout, Layout]]:
    """(layout of the checkpoint, layout of the run that goes on)."""
    found = []
    for zero, (old, new), offload in itertools.product(("stage1", "stage2", "stage3"), SIZES, OFFLOADS):
        found.append(((old, zero, offload), (new, zero, offload)))
    for (old_zero, new_zero), offload in itertools.product(STAGES, OFFLOADS):
        at = [(2, zero, "none" if zero == "stage0" else offload) for zero in (old_zero, new_zero)]
        found.append((at[0], at[1]))
    found.append(((2, "stage3", "none"), (3, "stage2", "cpu")))
    return found


def plan_of(layout: Layout) -> Plan:
    """The plan that trains in `layout`."""
    ranks, zero, offload = layout
    options = [text for text in REQUEST if zero == "stage3" or "sub_group_size" not in text]
    return planned(*options, f"zero={zero}", f"offload={offload}", f"cluster.num_procs={ranks}")


def whole_run(engines: Engines, runs: Runs, layout: Layout) -> Path:
    """A run of twenty steps in `layout`, with checkpoints at ten and twenty; shared by the tests of a session."""
    run = runs.folder / "-".join(map(str, ("matrix", *layout)))
    with FileLock(f"{run}.lock"):
        if not (run / "control" / "result.json").exists():
            engines.run_recipe(plan_of(layout), run)
    return run


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Masters, frozen weights and moments, by name."""
    state = open_optimizer(folder)
    found = {entry.name: entry.read() for entry in open_checkpoint(folder)}
    return found | {f"{key}/{entry.name}": entry.read() for key, entries in state.moments.items() for entry in entries}


@pytest.mark.parametrize(("old", "new"), changes(), ids=lambda layout: "-".join(map(str, layout)))
def test_another_layout_goes_on_with_the_same_state_and_losses(
    engines: Engines, runs: Runs, tmp_path: Path, old: Layout, new: Layout
) -> None:
    """deepspeedai/DeepSpeed#7584, #1017: several groups. #7599, #6441: sizes. #7546: what is saved after is whole.

    EleutherAI/gpt-neox#1029: the schedule goes on in the groups that the optimizer steps with.
    """
    whole = whole_run(engines, runs, old)
    source = whole / "checkpoints" / "step_00000010"
    run, resaved = tmp_path / "run", tmp_path / "resaved"
    engines.run_recipe(dataclasses.replace(plan_of(new), resume_from=str(source)), run, resaved)

    target = resaved / "checkpoints" / "step_00000010"
    before, after = tensors(source), tensors(target)
    assert before.keys() == after.keys() and len(before) == 20 + 2 * 19  # one norm has no moments
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    then, now = open_optimizer(source), open_optimizer(target)
    assert now.step == then.step == 10
    assert [group["weight_decay"] for group in now.groups] == [0.1, 0.0]
    assert [group["lr"] for group in now.groups] == [group["lr"] for group in then.groups]

    assert losses(run) == pytest.approx(losses(whole)[10:], rel=RELATIVE)
    rates = [record["lr"] for record in steps(run)]
    assert rates == [record["lr"] for record in steps(whole)[10:]] and len(set(rates)) == 10
    saved = manifest(run / "checkpoints" / "step_00000020")
    assert (saved["world_size"], saved["zero_stage"]) == (new[0], int(new[1][-1]))
    assert tensors(run / "checkpoints" / "step_00000020").keys() == before.keys()


def manifest(folder: Path) -> dict[str, Any]:
    """manifest.json of a checkpoint."""
    return dict(json.loads((folder / "manifest.json").read_text()))
