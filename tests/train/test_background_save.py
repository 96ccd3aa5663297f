"""Checkpoints written in the background are those written at once, and a kill within one never leaves half of it.

Run by pytest: real runs; tensors are compared bit for bit.
Must never take a checkpoint for committed because its folder is there: the manifest says so.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recipes.shared.checkpoint import manifest
from recipes.shared.checkpoint.background import Buffers, copied
from recipes.shared.checkpoint.reader import open_checkpoint, open_optimizer
from tests.train.running import SMALL, Runs, kill_everything, last_step, launch, losses, start, steps, wait_until
from tests.train.test_parity import overrides

BACKGROUND = "checkpoint.async=true"  # also checkpoint.background=true


@pytest.mark.parametrize(("zero", "offload"), [("stage1", "none"), ("stage3", "cpu_all")])
def test_background_checkpoints_equal_the_others_bit_for_bit(runs: Runs, zero: str, offload: str) -> None:
    plain = runs.get(*overrides("true", zero, offload))
    run = runs.get(*overrides("true", zero, offload), BACKGROUND)
    assert losses(run) == losses(plain)
    for step in (1, 10, 20):
        mine, theirs = (folder / "checkpoints" / f"step_{step:08d}" for folder in (run, plain))
        assert manifest.problem_of(mine) is None
        assert {path.name for path in mine.iterdir()} == {path.name for path in theirs.iterdir()}
        found = {entry.name: entry.read() for entry in open_checkpoint(mine)}
        for entry in open_checkpoint(theirs):
            assert torch.equal(found[entry.name], entry.read()), entry.name
        now, then = open_optimizer(mine), open_optimizer(theirs)
        assert now.step == then.step == step
        for key, entries in then.moments.items():
            for ours, other in zip(now.moments[key], entries, strict=True):
                assert torch.equal(ours.read(), other.read())
    assert not list((run / "checkpoints").glob(".saving-*"))


def test_the_next_snapshot_takes_the_memory_of_the_one_before_and_not_while_that_is_written() -> None:
    buffers = Buffers()

    def snapshot(first: float) -> tuple[torch.Tensor, torch.Tensor]:
        state = {"a": torch.full((3, 2), first), "b": torch.full((3, 2), first + 1), "part": [torch.full((2,), first)]}
        copy = copied(state, {}, buffers)
        assert copy["a"].tolist() == state["a"].tolist() and copy["b"].tolist() == state["b"].tolist()
        return copy["a"], copy["b"]

    one, two = snapshot(1.0), snapshot(2.0)
    assert len({tensor.data_ptr() for tensor in (*one, *two)}) == 4
    assert one[0][0, 0] == 1.0
    buffers.take_back()
    three, four = snapshot(3.0), snapshot(4.0)
    assert {tensor.data_ptr() for tensor in (*three, *four)} == {tensor.data_ptr() for tensor in (*one, *two)}


def test_killed_within_a_background_save_it_goes_on_bit_for_bit(runs: Runs) -> None:
    whole = runs.get(*overrides("true", "stage3", "cpu_all"))
    run = runs.new()
    options = (*overrides("true", "stage3", "cpu_all"), "checkpoint.every=1", "checkpoint.keep=3", BACKGROUND)
    process = start(*SMALL, *options, f"run.dir={run}")
    wait_until(
        lambda: (last_step(run) >= 6 and any((run / "checkpoints").glob(".saving-*"))) or process.poll() is not None
    )
    kill_everything(run)
    process.wait()
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text()
    assert manifest.problem_of(latest) is None
    assert last_step(run) - int(latest.name.removeprefix("step_")) <= 3
    done = launch("recipe=resume", f"run.dir={run}")
    assert done.returncode == 0, done.stderr
    assert losses(run) == losses(whole)
    assert [record["step"] for record in steps(run)] == list(range(1, 21))
    assert Path(json.loads((run / "plan.json").read_text())["resume_from"]).name >= latest.name
