"""A run begins with the weights of a folder, at every stage, and says by name what does not fit.

Run by pytest; the folders are written by Hugging Face's save_pretrained and by runs of the product.
Must never trust a loss: the masters of the first checkpoint are compared, bit for bit, after a step that moves nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.errors import UserError
from recipes.shared.checkpoint.reader import open_checkpoint
from recipes.shared.pretrained import open_weights
from tests.plan.asking import composed, planned
from tests.train.engines import TRAIN, Engines
from tests.train.running import launch

# A learning rate of 0: whatever the masters hold after a step, they held before it.
STILL = ("run.steps=1", "schedule=constant", "deepspeed.optimizer.params.lr=0.0", "eval.samples=2", "eval.every=0")
LLAMA: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}


def saved(folder: Path, family: str, **fields: Any) -> dict[str, torch.Tensor]:
    """A model of random weights in `folder`, in several files; its tensors by their names in the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    model.save_pretrained(folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").exists()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def begun(engines: Engines, run: Path, *options: str) -> dict[str, torch.Tensor]:
    """Masters in the checkpoint after a step, with a learning rate of 0, of a run that begins as `options` say."""
    engines.run_recipe(planned(*TRAIN, *STILL, *options), run)
    return {entry.name: entry.read() for entry in open_checkpoint(run / "checkpoints" / "step_00000001")}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether both hold the same names and elements."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("zero", "offload"), [("stage0", "none"), ("stage2", "none"), ("stage3", "cpu")])
@pytest.mark.parametrize("tied", [True, False])
def test_a_sharded_hugging_face_folder_is_what_the_run_begins_with(
    engines: Engines, tmp_path: Path, zero: str, offload: str, tied: bool
) -> None:
    """deepspeedai/DeepSpeed#762: the first step copies masters over weights; both must be those of the folder."""
    folder = tmp_path / "model"
    expected = saved(folder, "llama", tie_word_embeddings=tied, **LLAMA, **HEADS)
    options = ("model=hf", f"model.init_from={folder}", f"zero={zero}", f"offload={offload}")
    assert same(begun(engines, tmp_path / "run", *options), expected)


def test_files_without_the_bodys_prefix_fit(engines: Engines, tmp_path: Path) -> None:
    """GPT-2's own files call `transformer.wte` just `wte`, and hold causal masks that are computed now."""
    folder = tmp_path / "model"
    expected = saved(folder, "gpt2", vocab_size=256, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    tensors = {k.removeprefix("transformer."): v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, folder / "model.safetensors")
    options = ("model=hf", f"model.init_from={folder}", "zero=stage3")
    assert same(begun(engines, tmp_path / "run", *options), expected)


def test_a_checkpoint_of_ours_gives_its_masters_to_another_stage(engines: Engines, tmp_path: Path) -> None:
    small = [f"model.config.{name}={value}" for name, value in (LLAMA | HEADS).items()]
    first, step = tmp_path / "first", tmp_path / "first" / "checkpoints" / "step_00000002"
    engines.run_recipe(planned(*TRAIN, *small, "zero=stage3", "run.steps=2", "eval.samples=2", "eval.every=0"), first)
    expected = {entry.name: entry.read() for entry in open_checkpoint(step)}
    other = (*small, "run.seed=99")
    assert same(begun(engines, tmp_path / "run", *other, "zero=stage1", f"model.init_from={step}"), expected)
    four = ("cluster.num_procs=4", "zero=stage3")
    assert same(begun(engines, tmp_path / "wide", *other, *four, f"model.init_from={step}"), expected)


def test_the_configuration_is_that_of_the_weights(tmp_path: Path) -> None:
    saved(tmp_path, "llama", **LLAMA, **HEADS)
    config = composed("model=hf", f"model.init_from={tmp_path}").model.config
    assert (config["model_type"], config["hidden_size"]) == ("llama", 32)
    with pytest.raises(UserError) as refused:
        composed("model=tiny", f"model.init_from={tmp_path}")
    where = [problem.where for problem in refused.value.problems]
    assert "model.config.hidden_size" in where and "model.config.num_hidden_layers" in where


def test_what_does_not_fit_is_named(engines: Engines, tmp_path: Path) -> None:
    """huggingface/transformers#28244, huggingface/transformers#17336: neither a missing head nor one of another shape
    leaves a weight that nobody gave; the run does not start."""
    folder = tmp_path / "model"
    saved(folder, "llama", tie_word_embeddings=False, **LLAMA, **HEADS)
    tensors = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()

    def refused(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, folder / "model.safetensors")
        run = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        plan = planned(*TRAIN, *STILL, "model=hf", f"model.init_from={folder}", "zero=stage3")
        with pytest.raises(AssertionError) as failure:
            engines.run_recipe(plan, run)
        assert not list((run / "checkpoints").iterdir())
        return str(failure.value)

    less = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    assert "lm_head.weight: it has no tensor" in refused(less)
    assert "adapter.weight: these are no part of this model" in refused(tensors | {"adapter.weight": torch.ones(2)})
    assert "model.norm.weight [7] for [32]: these are of another shape" in refused(
        tensors | {"model.norm.weight": torch.ones(7)}
    )


def test_a_folder_without_usable_weights_is_refused(tmp_path: Path) -> None:
    done = launch(f"model.init_from={tmp_path / 'nothing'}")
    assert done.returncode == 2 and "there is no such folder" in done.stderr
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="only pickled weights are in it"):
        open_weights(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.ones(1)}, tmp_path / "model-1.safetensors")
    with pytest.raises(UserError, match="names 1 files that are not there"):
        open_weights(tmp_path)
