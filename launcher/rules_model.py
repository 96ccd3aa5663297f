"""Rules about the model, and about parts of DeepSpeed that these jobs never reach.

One function each, listed in `launcher.rules`; a file named in a docstring is DeepSpeed 0.19.8's and shows the reason.
Must never warn: what cannot be honoured is refused with its fix.
"""

from __future__ import annotations

from typing import Any

from launcher.cluster.value import Cluster
from launcher.errors import Problem
from launcher.schema import RunConfig

# (path, value that asks for nothing, why it is not reached, what to use instead)
UNREACHED: tuple[tuple[str, Any, str, str], ...] = (
    (
        "activation_checkpointing",
        {},
        "it acts on models that call deepspeed.checkpointing themselves; Hugging Face models do not",
        "use activation=full",
    ),
    ("compile.deepcompile", False, "DeepCompile starts with engine.compile(), which no recipe calls", "leave it out"),
    (
        "managed_gradient_accumulation",
        True,
        "without it every micro-batch is an optimizer step of its own, and the batch another one",
        "leave it out",
    ),
    ("dataloader_drop_last", False, "batches come from this project's own order of samples", "leave it out"),
    ("data_efficiency", {}, "batches come from this project's own order of samples", "leave it out"),
    ("hybrid_engine", {}, "it generates text between training steps, which no recipe does", "leave it out"),
    ("checkpoint.load_universal", False, "checkpoints are found and loaded by recipe=resume", "leave it out"),
    ("checkpoint.writer", None, "DeepSpeed cannot load what this writer saves", "leave it out"),
)
# Keys that make ranks hold parts of a layer or of a sequence, and the value that does not.
PARALLEL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("tensor_parallel.autotp_size", (0, 1)),
    ("tensor_parallel.tp.tp_size", (1,)),
    ("expert_parallel.enabled", (False,)),
    ("sequence_parallel_size", (1,)),
    ("pipeline", ({},)),
)


def objectives_are_those_of_an_own_module(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """Hugging Face's language models return one loss."""
    weights = config.train.objectives
    if not weights or config.model.target is not None:
        return None
    why = "only a module of your own returns several losses by name"
    return Problem("train.objectives", str(weights), why, "leave it out, or use model=custom model.target=MODULE.NAME")


def sequence_fits_the_model(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """An encoder-decoder reads half of a sequence and writes the rest; T5 counts distances, its n_positions is idle."""
    fields = config.model.config
    limit = fields.get(
        "max_position_embeddings", None if "t5" in str(fields.get("model_type")) else fields.get("n_positions")
    )
    if not isinstance(limit, int):
        return None
    longest = 2 * limit if fields.get("is_encoder_decoder") else limit
    if config.train.sequence_length <= longest:
        return None
    return Problem(
        "train.sequence_length",
        str(config.train.sequence_length),
        f"the model has {limit} positions",
        f"use {longest} or fewer, or another model",
    )


def model_shape_is_sound(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """Heads that do not divide, of families known here; transformers stops when the model is built, or its forward."""
    fields, kind = config.model.config, config.model.config.get("model_type")
    heads = fields.get("n_head" if kind == "gpt2" else "num_attention_heads")
    hidden = fields.get("n_embd" if kind == "gpt2" else "hidden_size")
    if kind not in ("gpt2", "llama") or not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        return []
    where = "model.config.n_head" if kind == "gpt2" else "model.config.num_attention_heads"
    if hidden % heads and not fields.get("head_dim"):
        nearest = max(count for count in range(1, heads + 1) if hidden % count == 0)
        return [Problem(where, str(heads), f"the hidden size {hidden} is no multiple of it", f"use {where}={nearest}")]
    if kind == "gpt2":
        return []
    problems = []
    width, groups = fields.get("head_dim") or hidden // heads, fields.get("num_key_value_heads") or heads
    if width % 2:
        why = "rotary positions turn pairs of elements, so the size of a head is even"
        fix = "change hidden_size, num_attention_heads or head_dim"
        problems.append(Problem("model.config.hidden_size", f"{width} elements a head", why, fix))
    if heads % groups:
        nearest = max(count for count in range(1, groups + 1) if heads % count == 0)
        where = "model.config.num_key_value_heads"
        why = f"the {heads} query heads are no multiple of it"
        problems.append(Problem(where, str(groups), why, f"use {where}={nearest}"))
    return problems


def own_module_has_no_hugging_face_options(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """A module of the user's own is built from `model.config` alone."""
    if config.model.target is None:
        return []
    return [
        Problem(
            f"model.{name}", str(value), "model.target names your own module, which does not read it", "leave it out"
        )
        for name, value in (("path", config.model.path), ("attn_implementation", config.model.attn_implementation))
        if value is not None
    ]


def ranks_are_data_parallel(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """Plans count every rank for the batch; __init__.py and module_inject would cut layers or sequences instead."""
    return [
        Problem(
            f"deepspeed.{path}",
            str(value),
            "every rank takes its own samples here: the batch would not be what the plan says",
            "leave it out; zero=stage3 divides a model that is too large for one device",
        )
        for path, harmless in PARALLEL
        if (value := _at(ds, path)) is not None and value not in harmless
    ]


def unreached_parts_are_not_asked_for(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """Keys that DeepSpeed reads and whose effect no recipe here comes to; a block in which nothing is on may stay."""
    return [
        Problem(f"deepspeed.{path}", "a block" if isinstance(value, dict) else str(value), why, fix)
        for path, harmless, why, fix in UNREACHED
        if (value := _at(ds, path)) is not None and (_asks(value) if isinstance(value, dict) else value != harmless)
    ]


def _asks(block: dict[str, Any]) -> bool:
    """Whether anything in `block` is on."""
    if block.get("enabled") is False:
        return False
    return any(_asks(value) if isinstance(value, dict) else bool(value) for value in block.values())


def _at(ds: dict[str, Any], path: str) -> Any:
    value: Any = ds
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
