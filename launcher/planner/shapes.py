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


def count_adapter(config: dict[str, Any], rank: int, target: list[str], saved: list[str]) -> int | None:
    """Parameters of a LoRA adapter beside the `target` layers, and of copies of the `saved` modules.

    None for a family other than Llama, and for names that are not its own.
    """
    if config.get("model_type") != "llama" or count_parameters(config) is None:
        return None
    linear, embedding = _llama_linear(config), config["vocab_size"] * config["hidden_size"]
    whole = {"embed_tokens": embedding, "lm_head": embedding, "norm": config["hidden_size"]}
    adapted = set(linear) if target == ["all-linear"] else set(target)
    if not adapted <= linear.keys() or not set(saved) <= whole.keys():
        return None
    matrices = config["num_hidden_layers"] * rank * sum(sum(linear[name]) for name in adapted)
    return int(matrices + sum(whole[name] for name in set(saved)))


def _llama(config: dict[str, Any]) -> int:
    """Embedding, L x (q, k, v, o; gate, up, down; two norms), final norm, head unless tied."""
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    linear = _llama_linear(config)
    biased = [name for field, names in _BIASED.items() if config.get(field) for name in names]
    layer = sum(width * out for width, out in linear.values()) + sum(linear[name][1] for name in biased)
    head = 0 if config.get("tie_word_embeddings") else vocab * hidden
    return vocab * hidden + layers * (layer + 2 * hidden) + hidden + head


def _llama_linear(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """{name: (inputs, outputs)} of the linear layers of each of its layers."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    attention = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return attention | {"o_proj": (queries, hidden)} | mlp


def _gpt2(config: dict[str, Any]) -> int:
    """Token and position embeddings, L x (fused qkv, projection, two-matrix MLP, two norms with bias), final norm."""
    hidden, layers = config["n_embd"], config["n_layer"]
    inner = config.get("n_inner") or 4 * hidden
    attention = hidden * 3 * hidden + 3 * hidden + hidden * hidden + hidden
    mlp = hidden * inner + inner + inner * hidden + hidden
    head = config["vocab_size"] * hidden if config.get("tie_word_embeddings") is False else 0
    embeddings = (config["vocab_size"] + config["n_positions"]) * hidden
    return embeddings + layers * (attention + mlp + 4 * hidden) + 2 * hidden + head


_BIASED = {
    "attention_bias": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp_bias": ("gate_proj", "up_proj", "down_proj"),
}
_FAMILIES = {"llama": _llama, "gpt2": _gpt2}
