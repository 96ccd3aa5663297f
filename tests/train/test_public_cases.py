"""Requests from public threads on what a model and its samples are to a rank; a test names its thread.

Run by pytest; ranks are those of the engine server, or pretended where nothing is exchanged.
Must never accept one rank's word for all.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from recipes.shared.distributed import Ranks
from recipes.shared.loop import step_batches
from tests.plan.asking import planned
from tests.train.engines import GPT2, Engines, request
from tests.train.own_models import Large


class Numbers:
    """Samples that are their own numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        return {"number": indices}

    def weights(self, indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.ones(len(indices))


def read(count: int, steps: int, *options: str) -> list[list[list[int]]]:
    """[step][rank]: numbers of the samples each rank reads in each step of a run over `count` samples."""
    plan = planned(*request(*options, base=()))
    found = []
    for step in range(steps):
        seen = step * plan.batch.global_batch_size
        of_step = []
        for rank in range(plan.world_size):
            ranks = Ranks(rank, rank, plan.world_size, torch.device("cpu"))
            state: Any = SimpleNamespace(plan=plan, ranks=ranks, samples_seen=seen)
            of_step.append([n for batch, _ in step_batches(state, Numbers(count)) for n in batch["number"].tolist()])
        found.append(of_step)
    return found


def test_ranks_read_disjoint_samples_that_cover_each_epoch_in_another_order() -> None:
    """X-LANCE/SLAM-LLM#93: all ranks read the same data. Four ranks, 100 samples, two epochs."""
    options = ("cluster.num_procs=4", "train.micro_batch_size=5", "train.gradient_accumulation_steps=1")
    found = read(100, 10, *options)
    epochs = [[n for step in found[first : first + 5] for rank in step for n in rank] for first in (0, 5)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(100))
    assert epochs[0] != epochs[1]
    of_ranks = [{n for step in found[:5] for n in step[rank]} for rank in range(4)]
    assert sum(map(len, of_ranks)) == len(set.union(*of_ranks)) == 100
    assert read(100, 10, *options) == found and read(100, 10, *options, "run.seed=2") != found


def test_micro_batches_left_over_at_an_epochs_end_are_carried_into_the_next() -> None:
    """deepspeedai/DeepSpeed#7439: 10 micro-batches an epoch and rank, 4 a step. Five steps are two epochs, none is
    shorter, and the schedule ends with the last."""
    options = ("cluster.num_procs=2", "train.micro_batch_size=1", "train.gradient_accumulation_steps=4", "run.steps=5")
    found = read(20, 5, *options)
    assert [[len(rank) for rank in step] for step in found] == [[4, 4]] * 5
    everything = [n for step in found for rank in step for n in rank]
    assert all(everything.count(number) == 2 for number in range(20))
    plan = planned("train.micro_batch_size=1", "train.gradient_accumulation_steps=4", "run.steps=5")
    assert plan.deepspeed["scheduler"]["params"]["total_num_steps"] == 5


def test_groups_and_norms_are_the_same_at_every_stage_and_on_every_rank(engines: Engines) -> None:
    """deepspeedai/DeepSpeedExamples#659: partitioned parameters have no dimensions to group by.
    deepspeedai/DeepSpeed#7255: the norm of one rank alone, or none."""
    found = {}
    for stage in range(4):
        plan = planned(*request(f"zero=stage{stage}", "parameters=no_decay", base=GPT2))
        answer = engines.call("tests.train.own_ranks:stepped", 2, plan=plan.to_json())
        assert "error" not in answer, answer
        first, second = answer["ranks"]
        assert first == second
        found[stage] = first
    assert all(len(group) > 3 for group in found[0]["groups"])
    assert all(found[stage]["groups"] == found[0]["groups"] for stage in found)
    assert [found[stage]["norm"] for stage in found] == pytest.approx([found[0]["norm"]] * 4, rel=1e-5)


def test_given_weights_are_in_shards_when_they_are_loaded(engines: Engines, tmp_path: Path) -> None:
    """Roblox/FAI-RL#66: the whole model in each rank's memory, whatever the number of ranks."""
    names = [f"layers.{number}.weight" for number in range(24)]
    matrix = torch.ones(2048, 2048)
    save_file({name: matrix * number for number, name in enumerate(names)}, tmp_path / "model.safetensors")
    own = ("model=custom", f"model.target=tests.train.own_models.{Large.__name__}", f"model.init_from={tmp_path}")
    plan = planned(*request("zero=stage3", "cluster.num_procs=2", *own, base=()))
    answer = engines.call("tests.train.own_ranks:grown", 2, plan=plan.to_json())
    assert "error" not in answer, answer
    for rank in answer["ranks"]:
        assert rank["whole"] == []
        assert rank["grown_bytes"] < 0.8 * 24 * 2048 * 2048 * 4
