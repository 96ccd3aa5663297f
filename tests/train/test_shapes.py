"""The planner's parameter shapes, which it computes without torch, are those of the models that transformers builds.

Run by pytest. Models are built on torch's meta device, where nothing is stored.
Must never compare counts alone: two wrong shapes can have the right sum.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
import torch

from launcher.planner.families import DEFAULTS, FAMILIES
from launcher.planner.shapes import active_parameters, count_parameters, parameter_shapes
from recipes.shared.hf_config import make_config, model_class

SIZES = {"vocab_size": [96, 131], "hidden_size": [32, 48], "intermediate_size": [40, 56], "num_hidden_layers": [1, 3]}
SIZES |= {"num_attention_heads": [4, 8], "tie_word_embeddings": [True, False]}
KEYS: dict[str, list[Any]] = {"num_key_value_heads": [2, 4]}
WIDTH: dict[str, list[Any]] = {"head_dim": [8, 12]}
BIAS: dict[str, list[Any]] = {"attention_bias": [True, False]}
SPARSE = {"num_experts": [3, 4], "num_experts_per_tok": [1, 2], "moe_intermediate_size": [24], "mlp_only_layers": [[0]]}
SPARSE |= {"decoder_sparse_step": [1, 2]}
FIELDS: dict[str, dict[str, list[Any]]] = {
    "llama": SIZES | KEYS | WIDTH | BIAS | {"mlp_bias": [True, False]},
    "mistral": SIZES | KEYS | WIDTH,
    "qwen2": SIZES | KEYS,
    "qwen3": SIZES | KEYS | WIDTH | BIAS,
    "gemma": SIZES | KEYS | WIDTH | BIAS,
    "gemma2": SIZES | KEYS | WIDTH | BIAS,
    "mixtral": SIZES | KEYS | {"num_local_experts": [3, 4], "num_experts_per_tok": [1, 2]},
    "qwen2_moe": SIZES | KEYS | SPARSE | {"shared_expert_intermediate_size": [28], "qkv_bias": [True, False]},
    "qwen3_moe": SIZES | KEYS | WIDTH | BIAS | SPARSE,
    "gpt2": {
        **{"vocab_size": [96, 131], "n_positions": [32], "n_embd": [32, 48], "n_layer": [1, 3], "n_head": [4]},
        **{"n_inner": [None, 40], "tie_word_embeddings": [True, False]},
    },
    "t5": {
        **{"vocab_size": [96], "d_model": [32, 48], "d_kv": [8], "d_ff": [40], "num_layers": [1, 3], "num_heads": [4]},
        **{"num_decoder_layers": [None, 2], "feed_forward_proj": ["relu", "gated-gelu"]},
        **{"relative_attention_num_buckets": [16, 32], "tie_word_embeddings": [True, False]},
    },
}
NEEDED = {"t5": {"decoder_start_token_id": 0}}
OPTIONAL = {"num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias"}
OPTIONAL |= {"n_inner", "num_decoder_layers", "feed_forward_proj", "relative_attention_num_buckets", "mlp_only_layers"}
OPTIONAL |= {"decoder_sparse_step"}


def built_sizes(config: dict[str, Any]) -> Counter[int]:
    """How many parameters of each size the library's model has, tied ones once."""
    described = make_config(config)
    with torch.device("meta"):
        model = model_class(described).from_config(described)
    model.tie_weights()
    return Counter(parameter.numel() for parameter in model.parameters())


def variations(kind: str, number: int) -> list[dict[str, Any]]:
    """Configurations of the family with fields drawn at random (seeded), some that may be left out left out."""
    draw, found = random.Random(kind), []
    for _ in range(number):
        fields = {name: draw.choice(values) for name, values in FIELDS[kind].items()}
        kept = {name: value for name, value in fields.items() if name not in OPTIONAL or draw.random() < 0.7}
        found.append({"model_type": kind} | kept | NEEDED.get(kind, {}))
    return found


def test_every_family_is_varied() -> None:
    assert FIELDS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("kind", FIELDS)
def test_every_parameter_has_the_size_that_transformers_gives_it(kind: str) -> None:
    """EleutherAI/cookbook#36, jranaraki/vllm-fit#27: gated MLPs, grouped queries, biases, norms, tied heads."""
    for config in variations(kind, 12):
        shapes = parameter_shapes(config)
        assert shapes is not None, config
        ours: Counter[int] = Counter()
        for size, number in shapes.sizes():
            ours[size] += number
        assert ours == built_sizes(config), config


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_field_left_out_has_the_librarys_value(kind: str) -> None:
    described = make_config({"model_type": kind})
    assert {name: getattr(described, name) for name in DEFAULTS[kind]} == DEFAULTS[kind]


def test_all_experts_are_counted_and_two_of_eight_used() -> None:
    """AlexsJones/llmfit#230: memory follows all of them, FLOPs those that a token is sent to."""
    config = next(iter(variations("mixtral", 1))) | {"num_local_experts": 8, "num_experts_per_tok": 2}
    one = 3 * config["hidden_size"] * config["intermediate_size"] * config["num_hidden_layers"]
    every = sum(size * number for size, number in built_sizes(config).items())
    assert count_parameters(config) == every
    assert active_parameters(config) == every - 6 * one


def test_a_dense_model_uses_every_parameter() -> None:
    config = variations("llama", 1)[0]
    shapes = parameter_shapes(config)
    assert shapes is not None and shapes.active == shapes.parameters
    assert {part.name for part in shapes.parts} >= {"embedding", "layer", "norm"}
    assert dataclasses.replace(shapes, parts=()).parameters == 0
