"""Claims about the models of conf/model: each has the published number of parameters, and uses those it should.

Run by pytest. GB is 1e9 bytes.
Must never take a size from the code it checks: these are the ones that the models' publishers print.
"""

from __future__ import annotations

import pytest

from launcher.planner.shapes import active_parameters, adapter_parts, count_adapter, count_parameters, parameter_shapes
from tests.plan.asking import CONF, composed, planned

PUBLISHED = {
    "gemma2_9b": 9_241_705_984,
    "gpt2_small": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "llama3_8b": 8_030_261_248,
    "llama_1b": 1_235_814_400,
    "llama_70b": 70_553_706_496,
    "llama_7b": 6_738_415_616,
    "mistral_7b": 7_248_023_552,
    "mixtral_8x7b": 46_702_792_704,
    "qwen2_5_72b": 72_706_203_648,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "t5_large": 737_668_096,
}
OURS = {"tiny", "llama_125m"}  # nobody published them
NO_CONFIGURATION = {"custom", "hf"}


def test_every_shipped_model_is_a_published_one_or_ours() -> None:
    """And the table of published sizes has no model that is not shipped."""
    assert {path.stem for path in (CONF / "model").glob("*.yaml")} == PUBLISHED.keys() | OURS | NO_CONFIGURATION


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_shipped_model_has_the_published_number_of_parameters(model: str) -> None:
    """EleutherAI/cookbook#36: 56e9 were predicted for Qwen 72B. The issue asks for 0.5 %; these are exact."""
    assert count_parameters(composed(f"model={model}").model.config) == PUBLISHED[model]


def test_a_dense_gated_model_with_grouped_queries_and_biases_is_counted_tensor_by_tensor() -> None:
    """EleutherAI/cookbook#36, by hand: three MLP matrices, 8 of 64 heads for k and v, biases, two norms."""
    attention = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 8192 + 2 * 1024
    layer = attention + 3 * 8192 * 29568 + 2 * 8192
    assert count_parameters(composed("model=qwen2_5_72b").model.config) == 2 * 152064 * 8192 + 80 * layer + 8192


def test_a_model_with_experts_is_planned_with_all_of_them() -> None:
    """AlexsJones/llmfit#230, jranaraki/vllm-fit#27: memory follows the total; a token uses 12.9e9 of 46.7e9."""
    config = composed("model=mixtral_8x7b").model.config
    assert active_parameters(config) == pytest.approx(12.9e9, rel=0.005)
    plan = planned("model=mixtral_8x7b", "zero=stage3", "precision=bf16", "train.sequence_length=128")
    assert plan.estimate.parameters == PUBLISHED["mixtral_8x7b"]
    assert plan.estimate.device_bytes["weights"] == 2 * PUBLISHED["mixtral_8x7b"] // plan.world_size


def test_one_head_is_the_difference_between_tied_and_untied() -> None:
    """jranaraki/vllm-fit#27: 262e6 parameters of a vocabulary of 128,000 and hidden size 2048, once."""
    fields = composed("model=llama_1b").model.config
    tied, untied = (parameter_shapes(fields | {"tie_word_embeddings": value}) for value in (True, False))
    assert tied is not None and untied is not None
    assert untied.parameters - tied.parameters == 128256 * 2048
    assert untied.multiplied == tied.multiplied  # an output layer computes the same, wherever its weights are stored


def test_looked_up_tables_are_not_multiplied() -> None:
    gpt2 = parameter_shapes(composed("model=gpt2_small").model.config)
    llama = parameter_shapes(composed("model=llama_7b").model.config)
    assert gpt2 is not None and llama is not None
    assert gpt2.multiplied == PUBLISHED["gpt2_small"] - 1024 * 768
    assert llama.multiplied == PUBLISHED["llama_7b"] - 32000 * 4096


def test_one_rank_shows_the_same_model_state_at_every_stage() -> None:
    """deepspeedai/DeepSpeed#237: one data-parallel rank has nobody to share with."""
    one = [planned(f"zero=stage{stage}", "cluster.num_procs=1").estimate.textbook_bytes for stage in range(4)]
    assert len(set(one)) == 1


@pytest.mark.parametrize("model", ["llama_7b", "mistral_7b", "qwen2_5_7b", "qwen3_8b", "gemma2_9b"])
def test_an_adapter_is_two_matrices_beside_each_layer(model: str) -> None:
    config = composed(f"model={model}").model.config
    parts = adapter_parts(config, 8, ["q_proj", "v_proj"], [])
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    queries, keys = (config[f"num_{name}_heads"] * width for name in ("attention", "key_value"))
    layer = 8 * (2 * config["hidden_size"] + queries + keys)
    assert count_adapter(config, 8, ["q_proj", "v_proj"], []) == config["num_hidden_layers"] * layer
    assert parts is not None and len(parts[0].sizes) == 4
    assert count_adapter(config, 8, ["q_proj", "no_such"], []) is None
    assert count_adapter(composed("model=mixtral_8x7b").model.config, 8, ["q_proj"], []) is None
