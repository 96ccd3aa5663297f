"""Rules about fine-tuning: where its weights come from, what it reads, and what it says at evaluations.

One function each, listed in `launcher.rules`; a file named in a docstring shows the reason.
Must never warn: what cannot be honoured is refused with its fix.
"""

from __future__ import annotations

from typing import Any

from launcher.cluster.value import Cluster
from launcher.errors import Problem
from launcher.schema import RunConfig

FINETUNE, CHAT = "finetune", "chat"


def finetuning_begins_with_weights(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    if config.recipe.name != FINETUNE or config.model.init_from is not None:
        return None
    why = "fine-tuning goes on from trained weights; these would be drawn from run.seed"
    return Problem("model.init_from", "null", why, "add model.init_from=FOLDER, or use recipe=pretrain")


def conversations_are_finetuned(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """Either is made for the other: pretraining reads windows of running text."""
    kind, finetunes = str(config.data.get("kind")), config.recipe.name == FINETUNE
    if finetunes == (kind == CHAT) or config.recipe.name not in (FINETUNE, "pretrain"):
        return None
    if finetunes:
        why = "it holds running text, in which no token is a response"
        return Problem("data", kind, why, "use data=chat with data.files and data.tokenizer, or recipe=pretrain")
    return Problem("data", kind, "pretraining reads running text, not conversations", "add recipe=finetune")


def finetuned_models_go_on_in_one_sequence(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """Labels are those of the sequence itself; a module of one's own may read anything."""
    if config.recipe.name != FINETUNE:
        return None
    fix = "use recipe=custom with a recipe of your own, or a causal language model"
    if config.model.target is not None:
        why = "it is not known to read input_ids and labels as a causal language model does"
        return Problem("model.target", config.model.target, why, fix)
    if config.model.config.get("is_encoder_decoder"):
        why = "a response goes on in its prompt's sequence, which an encoder-decoder reads apart"
        return Problem("model.config.is_encoder_decoder", "true", why, fix)
    return None


def packs_are_kept_apart(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> Problem | None:
    """transformers 5.24 modeling_flash_attention_utils.py `_is_packed_sequence` looks at a batch of one row alone."""
    kernel, rows = str(config.model.attn_implementation), ds.get("train_micro_batch_size_per_gpu")
    packed = config.data.get("kind") == CHAT and config.data.get("packing") is True
    if not packed or "flash" not in kernel or not isinstance(rows, int) or rows == 1:
        return None
    why = f"with {kernel} conversations in a row are kept apart only where a micro-batch is one row"
    return Problem(
        "data.packing",
        f"true, train.micro_batch_size={rows}",
        why,
        "use train.micro_batch_size=1 or data.packing=false",
    )


def generation_needs_prompts(config: RunConfig, cluster: Cluster, ds: dict[str, Any]) -> list[Problem]:
    """A held-out conversation gives the prompt."""
    least = {"eval.generate": (config.eval.generate, 0), "eval.max_new_tokens": (config.eval.max_new_tokens, 1)}
    found = [
        Problem(where, str(value), f"it is at least {minimum}", f"{where}={minimum} or more")
        for where, (value, minimum) in least.items()
        if value < minimum
    ]
    if config.eval.generate > 0 and config.recipe.name != FINETUNE:
        why = "prompts are those of held-out conversations, which this recipe does not read"
        found.append(Problem("eval.generate", str(config.eval.generate), why, "use recipe=finetune, or leave it out"))
    return found
