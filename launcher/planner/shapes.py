"""Parameter counts of Hugging Face configurations, computed without torch.

Called when a plan is built. Families known here are exact; others give None and are measured by `recipes`.
Must never guess: an unknown `model_type`, or a field that changes shapes and is not handled, is None.
"""

from __future__ import annotations

from typing import Any

# Fields that would change shapes in a way the formulas below do not cover, and the value at which they do not.
_UNHANDLED: dict[str, dict[str, Any]] = {"llama": {"pretraining_tp": 1}, "gpt2": {"add_cross_attention": False}}


def count_parameters(config: dict[str, Any]) -> int | None:
    """Trainable parameters, tied weights once; None when this configuration has to be measured."""
    kind = config.get("model_type")
    if kind not in _FAMILIES or any(
        config.get(field) not in (None, harmless) for field, harmless in _UNHANDLED[kind].items()
    ):
        return None
    try:
        return _FAMILIES[kind](config)
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _llama(config: dict[str, Any]) -> int:
    """Embedding, L x (q, k, v, o; gate, up, down; two norms), final norm, head unless tied."""
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    if config.get("attention_bias"):
        attention += (heads + 2 * kv_heads) * head_dim + hidden
    mlp = 3 * hidden * config["intermediate_size"]
    if config.get("mlp_bias"):
        mlp += 2 * config["intermediate_size"] + hidden
    head = 0 if config.get("tie_word_embeddings") else vocab * hidden
    return vocab * hidden + layers * (attention + mlp + 2 * hidden) + hidden + head


def _gpt2(config: dict[str, Any]) -> int:
    """Token and position embeddings, L x (fused qkv, projection, two-matrix MLP, two norms with bias), final norm."""
    hidden, layers = config["n_embd"], config["n_layer"]
    inner = config.get("n_inner") or 4 * hidden
    attention = hidden * 3 * hidden + 3 * hidden + hidden * hidden + hidden
    mlp = hidden * inner + inner + inner * hidden + hidden
    head = config["vocab_size"] * hidden if config.get("tie_word_embeddings") is False else 0
    embeddings = (config["vocab_size"] + config["n_positions"]) * hidden
    return embeddings + layers * (attention + mlp + 4 * hidden) + 2 * hidden + head


_FAMILIES = {"llama": _llama, "gpt2": _gpt2}
