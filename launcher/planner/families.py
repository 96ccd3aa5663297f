"""Model families -> the parts of a model, each with the elements of its parameters, as transformers 5 builds them.

Called by `launcher.planner.shapes` with a configuration in which the library's own defaults are filled in.
Must never fill in a size that a configuration leaves out: a missing one is a KeyError, and the model is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.planner.parts import Block, Part, Shapes

# Fields that configurations leave out, at the value transformers gives them then; tests/train compares them with it.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_key_value_heads": 16, "qkv_bias": True, "decoder_sparse_step": 1, "num_experts_per_tok": 4},
    "qwen3_moe": {"num_key_value_heads": 4, "decoder_sparse_step": 1, "num_experts_per_tok": 8},
    "t5": {"relative_attention_num_buckets": 32, "feed_forward_proj": "relu"},
}
GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")  # dense decoders with a gated MLP of three matrices
CAUSAL = 0.5  # of the scores between a sequence's tokens are used where none looks ahead


def linear_layers(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """{name: (inputs, outputs)} of the linear layers of a dense decoder's layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return _attention(config) | mlp


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = _head_width(config)
    queries, keys = heads * width, (config.get("num_key_value_heads") or heads) * width
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
    }


def _head_width(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _attention_block(config: dict[str, Any]) -> Block:
    """q, k, v, o with the biases and the norms of queries and keys that the family has."""
    kind, layers = config["model_type"], _attention(config)
    biased: tuple[str, ...] = ()
    if kind == "qwen2" or (kind == "qwen2_moe" and config["qkv_bias"]):
        biased = ("q_proj", "k_proj", "v_proj")
    elif kind in ("llama", "qwen3", "qwen3_moe", "gemma", "gemma2") and config.get("attention_bias"):
        biased = tuple(layers)
    normed = ("q_proj", "k_proj") if kind in ("qwen3", "qwen3_moe") else ()
    found: list[Block] = []
    for name, (inputs, outputs) in layers.items():
        found.append(Block((inputs * outputs, outputs) if name in biased else (inputs * outputs,)))
        if name in normed:
            found.append(Block((_head_width(config),)))
    return Block(inner=tuple(found))


def _mlp_block(hidden: int, inner: int, biased: bool = False) -> Block:
    """gate, activation, up, down."""
    wide = Block((hidden * inner, inner) if biased else (hidden * inner,))
    return Block(inner=(wide, Block(), wide, Block((hidden * inner, hidden) if biased else (hidden * inner,))))


def _layer(hidden: int, attention: Block, mlp: Block, norms: int = 2) -> Block:
    """Each of the two behind a norm, and with four norms before another."""
    norm = Block((hidden,))
    after = (norm,) if norms == 4 else ()
    return Block(inner=(norm, attention, *after, norm, mlp, *after))


def _decoder(config: dict[str, Any], layers: tuple[Part, ...]) -> Shapes:
    """Embedding, layers, final norm, and a head unless tied."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tied, table = bool(config.get("tie_word_embeddings")), Block((vocab * hidden,))
    embedding, norm = Part("embedding", 1, table, multiplied=False), Part("norm", 1, Block((hidden,)))
    head = () if tied else (Part("head", 1, table),)
    width = config["num_hidden_layers"] * config["num_attention_heads"] * _head_width(config)
    return Shapes((embedding, *layers, norm, *head), width * CAUSAL, tied_head=vocab * hidden if tied else 0)


def _gated(config: dict[str, Any]) -> Shapes:
    """L x (attention; gate, up, down; two norms, four with Gemma 2)."""
    hidden, kind = config["hidden_size"], config["model_type"]
    mlp = _mlp_block(hidden, config["intermediate_size"], biased=kind == "llama" and bool(config.get("mlp_bias")))
    layer = _layer(hidden, _attention_block(config), mlp, norms=4 if kind == "gemma2" else 2)
    return _decoder(config, (Part("layer", config["num_hidden_layers"], layer),))


def _mixtral(config: dict[str, Any]) -> Shapes:
    """Every layer has experts."""
    sizes, idle = _expert_sizes(config, config["num_local_experts"], config["intermediate_size"])
    layer = _layer(config["hidden_size"], _attention_block(config), Block(sizes, leaf=True))
    return _decoder(config, (Part("expert layer", config["num_hidden_layers"], layer, idle=idle),))


def _expert_sizes(config: dict[str, Any], experts: int, inner: int) -> tuple[tuple[int, ...], int]:
    """Sizes of gate and up of all experts together, down of all, and the router; elements one token does not use."""
    hidden, chosen = config["hidden_size"], min(config["num_experts_per_tok"], experts)
    sizes = (experts * 2 * inner * hidden, experts * hidden * inner, experts * hidden)
    return sizes, (experts - chosen) * 3 * hidden * inner


def _qwen_moe(config: dict[str, Any]) -> Shapes:
    """Layers with experts where decoder_sparse_step and mlp_only_layers say so, dense ones elsewhere.

    Qwen2's have one expert for all tokens beside the chosen ones, and a gate for it.
    """
    hidden, experts = config["hidden_size"], config["num_experts"]
    dense_only, step = config.get("mlp_only_layers") or [], config["decoder_sparse_step"]
    layers = range(config["num_hidden_layers"])
    sparse = [layer for layer in layers if layer not in dense_only and experts > 0 and (layer + 1) % step == 0]
    parts: list[Part] = []
    if sparse:
        sizes, idle = _expert_sizes(config, experts, config["moe_intermediate_size"])
        if config["model_type"] == "qwen2_moe":
            sizes += (hidden * config["shared_expert_intermediate_size"],) * 3 + (hidden,)
        layer = _layer(hidden, _attention_block(config), Block(sizes, leaf=True))
        parts.append(Part("expert layer", len(sparse), layer, idle=idle))
    if len(sparse) < len(layers):
        layer = _layer(hidden, _attention_block(config), _mlp_block(hidden, config["intermediate_size"]))
        parts.append(Part("layer", len(layers) - len(sparse), layer))
    return _decoder(config, tuple(parts))


def _gpt2(config: dict[str, Any]) -> Shapes:
    """Token and position tables, L x (fused qkv, projection, two-matrix MLP, two norms; all with bias), final norm."""
    hidden, layers, vocab = config["n_embd"], config["n_layer"], config["vocab_size"]
    inner = config.get("n_inner") or 4 * hidden
    drop, table = Block(), Block((vocab * hidden,))
    attention = Block(inner=(Block((hidden * 3 * hidden, 3 * hidden)), Block((hidden * hidden, hidden)), drop))
    mlp = Block(inner=(Block((hidden * inner, inner)), Block(), Block((inner * hidden, hidden)), drop))
    norm = Block((hidden, hidden))
    tied = config.get("tie_word_embeddings") is not False
    parts = [
        Part("embedding", 1, table, multiplied=False),
        Part("positions", 1, Block((config["n_positions"] * hidden,)), multiplied=False),
        Part("layer", layers, Block(inner=(norm, attention, norm, mlp))),
        Part("norm", 1, norm),
    ]
    if not tied:
        parts.append(Part("head", 1, table))
    return Shapes(tuple(parts), layers * hidden * CAUSAL, tied_head=vocab * hidden if tied else 0)


def _t5(config: dict[str, Any]) -> Shapes:
    """One table for encoder, decoder and head; each stack's first layer has the table of relative positions.

    transformers 5 ties the head of every T5. A sample's first half is read and its second written, so the encoder
    scores a quarter of the token pairs, as does the decoder's look at it, and the decoder itself half of a quarter.
    """
    hidden, vocab, heads, inner = config["d_model"], config["vocab_size"], config["num_heads"], config["d_ff"]
    width, depth = heads * config["d_kv"], config["num_layers"]
    decoders = config.get("num_decoder_layers") or depth
    norm, projection, wide = Block((hidden,)), Block((hidden * width,)), Block((hidden * inner,))
    attention = Block(inner=(norm, Block(inner=(projection,) * 4), Block()))
    gated = str(config["feed_forward_proj"]).startswith("gated-")
    mlp = Block(inner=(norm, Block(inner=(wide, Block(), *((wide,) if gated else ()), Block(), wide)), Block()))
    positions = Block((config["relative_attention_num_buckets"] * heads,))
    parts = (
        Part("embedding", 1, Block((vocab * hidden,)), multiplied=False),
        Part("relative positions", 2, positions, multiplied=False),
        Part("encoder layer", depth, Block(inner=(attention, mlp))),
        Part("decoder layer", decoders, Block(inner=(attention, attention, mlp))),
        Part("norm", 2, norm),
    )
    scored = width * (depth + decoders * (1 + CAUSAL)) / 4
    return Shapes(parts, scored, tied_head=vocab * hidden, passes=0.5)


FAMILIES: dict[str, Callable[[dict[str, Any]], Shapes]] = {
    "llama": _gated,
    "mistral": _gated,
    "qwen2": _gated,
    "qwen3": _gated,
    "gemma": _gated,
    "gemma2": _gated,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "gpt2": _gpt2,
    "t5": _t5,
}
