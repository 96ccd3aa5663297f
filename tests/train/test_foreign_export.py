"""Checkpoints of DeepSpeed alone and of Hugging Face's Trainer are exported whole, tensor for tensor.

Run by pytest; the checkpoints are made by foreign_ranks.py, without a part of the product.
Must never compare with what our own reader says.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.engines import Engines
from tests.train.running import launch

RANKS = "tests.train.foreign_ranks"


def exported(source: Path, *options: str) -> dict[str, torch.Tensor]:
    """Tensors of the export of `source`."""
    target = source / "exported"
    done = launch("recipe=export", f"export.source={source}", f"export.dir={target}", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return load_file(target / "model.safetensors")


@pytest.mark.parametrize(("stage", "precision"), [*itertools.product((1, 2, 3), ("fp32",)), (3, "bf16"), (0, "fp32")])
def test_every_tensor_of_an_odd_module_is_exported(
    engines: Engines, tmp_path: Path, stage: int, precision: str
) -> None:
    """deepspeedai/DeepSpeed#1017: groups, odd sizes, three ranks. #1146: buffers. #3205: frozen weights."""
    answer = engines.call(f"{RANKS}:odd", 3, stage=stage, precision=precision, folder=str(tmp_path))
    assert "error" not in answer, answer["error"] + answer["log"]
    found, expected = exported(tmp_path), torch.load(tmp_path / "expected.pt")
    assert found.keys() == expected.keys() and "scratch" not in found and "head.weight" not in found
    for name, tensor in expected.items():
        trained = tensor.is_floating_point() and name != "mean"
        assert found[name].dtype == (torch.float32 if trained else tensor.dtype), name
        assert torch.equal(found[name], tensor.float() if trained else tensor), name
    answer = json.loads((tmp_path / "exported" / "export.json").read_text())
    assert answer["tied"] == {"head.weight": "embed.weight"} and answer["described"] is False


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainers_checkpoint_is_exported_with_its_config(engines: Engines, tmp_path: Path, stage: int) -> None:
    pytest.importorskip("accelerate")
    answer = engines.call(f"{RANKS}:trainer", 2, stage=stage, folder=str(tmp_path))
    assert "error" not in answer, answer["error"] + answer["log"]
    found, expected = exported(tmp_path / "checkpoint-2"), torch.load(tmp_path / "expected.pt")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    config = json.loads((tmp_path / "checkpoint-2" / "exported" / "config.json").read_text())
    assert config["hidden_size"] == 32 and config["architectures"] == ["LlamaForCausalLM"]


def test_a_folder_that_is_no_single_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    def refused(*options: str) -> str:
        done = launch("recipe=export", f"export.source={tmp_path}", *options)
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stderr

    target = f"export.dir={tmp_path / 'out'}"
    assert "no *_model_states.pt in it" in refused(target)
    assert "no run folder to put it in" in refused()
    assert "run.dir names a checkpoint too" in refused(target, f"run.dir={tmp_path}")
    for name in ("global_step1", "global_step2"):
        (tmp_path / name).mkdir()
        torch.save({}, tmp_path / name / "mp_rank_00_model_states.pt")
    assert "name one of global_step1, global_step2" in refused(target)
    (tmp_path / "latest").write_text("global_step3")
    assert "its `latest` names global_step3, and no checkpoint is there" in refused(target)
    (tmp_path / "latest").write_text("global_step2")
    torch.save({}, tmp_path / "global_step2" / "mp_rank_01_model_states.pt")
    assert "split over ranks by more than ZeRO" in refused(target)
    assert not (tmp_path / "out").exists()
