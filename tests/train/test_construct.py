"""Sharded construction gives, on two ranks, exactly the weights of a plain construction; memory stays sharded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.env import extensions_dir
from launcher.rendezvous import free_port
from tests.train.running import ROOT

MODELS = ("llama_tied", "llama_untied", "gpt2", "qwen2", "mixtral", "t5", "hostile")


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, object]]]:
    """What tests/train/construct_worker.py found on each of two ranks."""
    folder = tmp_path_factory.mktemp("construct")
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "train" / "construct_worker.py"), str(folder / f"{rank}.json")],
            env=os.environ
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "TORCH_EXTENSIONS_DIR": str(extensions_dir()),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return [json.loads(Path(folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_and_buffer_equals_plain_construction(
    findings: list[dict[str, dict[str, object]]], model: str
) -> None:
    for rank in findings:
        assert rank[model]["different"] == []
        assert rank[model]["compared"] > 5  # type: ignore[operator]  # a number


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_partitioned_over_two_ranks(
    findings: list[dict[str, dict[str, object]]], model: str
) -> None:
    for rank in findings:
        assert rank[model]["not_partitioned"] == []


def test_whole_parameters_are_few_at_a_time(findings: list[dict[str, dict[str, object]]]) -> None:
    """A model of 20 equal matrices: at no time were more than a third of its bytes whole on a rank."""
    for rank in findings:
        assert 0 < rank["deep"]["peak_fraction"] < 1 / 3  # type: ignore[operator]  # a number


def test_bf16_shards_are_the_rounded_fp32_weights(findings: list[dict[str, dict[str, object]]]) -> None:
    for rank in findings:
        assert rank["bf16"]["different"] == []


@pytest.mark.parametrize("model", ["first_with_hpz", "second_with_hpz"])
def test_a_process_builds_several_models_with_hpz(findings: list[dict[str, dict[str, object]]], model: str) -> None:
    """deepspeedai/DeepSpeed#7066: the second one met "intra parallel group is already initialized"."""
    for rank in findings:
        assert rank[model]["different"] == [] and rank[model]["not_partitioned"] == []
