"""The models people bring compute what plain PyTorch computes, at stages 0, 2 and 3.

Run by pytest: the recipe as its workers run it, on two ranks that the engine server forks, against one plain loop.
Must never compare two of our own runs: the reference is tests/train/plain.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.plan import Plan
from recipes.shared.lora import adapted
from recipes.shared.model import from_config
from recipes.shared.profile import build
from tests.plan.asking import planned
from tests.train.engines import Engines
from tests.train.plain import plain_steps
from tests.train.running import losses, steps
from tests.train.test_own_code import EXAMPLE

RELATIVE = 1e-5  # of a loss in fp32: sums over ranks and micro-batches are taken in another order
NORM_RELATIVE = 1e-4  # of a gradient's norm, which is a difference of such sums
STEPS = 20
TRAINING = (
    *("train.sequence_length=32", "train.micro_batch_size=2", "train.gradient_accumulation_steps=2"),
    *("cluster.num_procs=2", f"run.steps={STEPS}", "eval.every=0", "eval.samples=2"),
)
BODY: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
BODY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}
GPT2 |= {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5: dict[str, Any] = {"model_type": "t5", "vocab_size": 256, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
T5 |= {"num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
TIED = {"model_type": "llama", "tie_word_embeddings": "true"} | BODY
LORA = (
    "peft=lora",
    "peft.rank=4",
    "peft.target=[q_proj,v_proj]",
    "peft.dropout=0.0",
    "deepspeed.optimizer.params.lr=0.01",
)


def hf(fields: dict[str, Any]) -> tuple[str, ...]:
    """The request for a model of these configuration fields."""
    return ("model=hf", *(f"model.config.{name}={value}" for name, value in fields.items()))


MODELS: dict[str, tuple[str, ...]] = {
    "llama, tied": hf(TIED),
    "gpt2": hf(GPT2),
    "qwen3": hf({"model_type": "qwen3", "head_dim": 8} | BODY),
    "mixtral": hf({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2} | BODY),
    "t5": hf(T5),
    "lora on llama": (*hf({"model_type": "llama"} | BODY), *LORA),
    "own module": EXAMPLE,  # buffers, a parameter without dimensions, and one that two modules use
}
_plain: dict[str, list[tuple[float, float]]] = {}


def reference(name: str, plan: Plan) -> list[tuple[float, float]]:
    """Loss and norm of each step of the plain loop; the same for every stage."""
    if name not in _plain:
        _plain[name] = plain_steps(plan)
    return _plain[name]


@pytest.mark.parametrize("name", [name for name, request in MODELS.items() if request[0] == "model=hf"])
def test_the_planner_counts_parameters_without_storing_them(name: str) -> None:
    plan = planned(*MODELS[name], *TRAINING)
    expected = sum(parameter.numel() for parameter in adapted(plan, from_config(plan)).parameters())
    assert sum(parameter.numel() for parameter in build(plan.config).parameters()) == expected


@pytest.mark.parametrize("zero", ["stage0", "stage2", "stage3"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_norms_equal_plain_pytorch(engines: Engines, tmp_path: Path, name: str, zero: str) -> None:
    """deepspeedai/DeepSpeed#7255, on the norm: it is there at every stage, and one of all ranks together."""
    plan = planned(*MODELS[name], *TRAINING, f"zero={zero}")
    engines.run_recipe(plan, tmp_path / "run")
    expected = reference(name, plan)
    assert len(expected) == STEPS and expected[-1][0] < expected[0][0]
    assert losses(tmp_path / "run") == pytest.approx([loss for loss, _ in expected], rel=RELATIVE, abs=0)
    norms = [record["grad_norm"] for record in steps(tmp_path / "run")]
    assert norms == pytest.approx([norm for _, norm in expected], rel=NORM_RELATIVE, abs=0)
