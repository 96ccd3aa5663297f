"""Exact parameter shapes of Hugging Face configurations, computed without torch.

Called when a plan is built. Families known here are exact; others give None and are measured by `recipes`.
Must never guess: an unknown `model_type`, or a field that changes shapes and is not handled, is None.
"""

from __future__ import annotations

from typing import Any

from launcher.planner import families
from launcher.planner.parts import Block, Part, Shapes

# Fields that would change shapes in a way the formulas do not cover, and the value at which they do not. Some families
# take sizes under a second name too (attribute_map), which wins over the first.
_UNHANDLED: dict[str, dict[str, Any]] = {
    "llama": {"pretraining_tp": 1},
    "gpt2": {"add_cross_attention": False, "hidden_size": None, "num_hidden_layers": None}
    | {"num_attention_heads": None, "max_position_embeddings": None},
    "t5": {"is_encoder_decoder": True, "hidden_size": None, "num_hidden_layers": None}
    | {"num_attention_heads": None, "head_dim": None},
    "mixtral": {"num_experts": None},
}


def parameter_shapes(config: dict[str, Any]) -> Shapes | None:
    """Every parameter's number of elements; None when this configuration has to be measured."""
    kind = config.get("model_type")
    if kind not in families.FAMILIES or any(
        config.get(field) not in (None, harmless) for field, harmless in _UNHANDLED.get(kind, {}).items()
    ):
        return None
    try:
        found = families.FAMILIES[kind](families.DEFAULTS.get(kind, {}) | config)
        whole = all(isinstance(size, int) and size > 0 for part in found.parts for size in part.sizes)
    except (KeyError, TypeError, ZeroDivisionError, AttributeError):
        return None
    return found if whole else None


def count_parameters(config: dict[str, Any]) -> int | None:
    """Trainable parameters, tied weights once, all experts; None when this configuration has to be measured."""
    found = parameter_shapes(config)
    return None if found is None else found.parameters


def active_parameters(config: dict[str, Any]) -> int | None:
    """Parameters that one token uses: all but the experts it is not sent to. FLOPs follow these, memory all."""
    found = parameter_shapes(config)
    return None if found is None else found.active


def adapter_parts(config: dict[str, Any], rank: int, target: list[str], saved: list[str]) -> tuple[Part, ...] | None:
    """Parameters of a LoRA adapter beside the `target` layers, and of copies of the `saved` modules.

    Beside each layer of (inputs, outputs) two matrices: rank x inputs, outputs x rank (Hu et al., LoRA, section 4.1).
    None for a family without dense gated layers, and for names that are not its own.
    """
    if config.get("model_type") not in families.GATED or parameter_shapes(config) is None:
        return None
    full = families.DEFAULTS.get(config["model_type"], {}) | config
    linear, embedding = families.linear_layers(full), full["vocab_size"] * full["hidden_size"]
    whole = {"embed_tokens": embedding, "lm_head": embedding, "norm": full["hidden_size"]}
    adapted = list(linear) if target == ["all-linear"] else sorted(set(target))
    if not set(adapted) <= linear.keys() or not set(saved) <= whole.keys():
        return None
    beside = [(Block(), *(Block((rank * width,)) for width in linear[name])) for name in adapted]  # dropout, A, B
    matrices = Block(inner=tuple(block for blocks in beside for block in blocks))
    copies = tuple(Part(name, 1, Block((whole[name],))) for name in sorted(set(saved)))
    return (Part("adapter", full["num_hidden_layers"], matrices), *copies)


def count_adapter(config: dict[str, Any], rank: int, target: list[str], saved: list[str]) -> int | None:
    """Elements of `adapter_parts`, or None."""
    parts = adapter_parts(config, rank, target, saved)
    return None if parts is None else sum(part.parameters for part in parts)
