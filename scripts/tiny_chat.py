"""A tiny tokenizer with a chat template, a tiny Llama, and questions and answers about the standard library's names.

Called by scripts/make_tiny_chat and by the tests of fine-tuning.
Must never ask what cannot be learned: every answer follows from its question by a rule, names held out included.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.shared.data.files import path_hash
from recipes.shared.data.kinds.stdlib import StdlibSource

MAX_BYTES = 4_000_000  # of sources: some hundred names, seconds of work
TEXT_CHARACTERS = 1_000_000  # of them, for the tokenizer and for pre-training
VOCABULARY = 1024
HELD_OUT = 10  # one in so many names
BEGIN, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Name:
    """A public class or function of a module."""

    module: str
    name: str
    kind: str


def make(folder: Path) -> str:
    """Writes everything into `folder`, which must not exist yet; says what was made."""
    folder.mkdir(parents=True)
    source = StdlibSource(max_bytes=MAX_BYTES, validation_fraction=0.1)
    files = {name: (source.root / name).read_text(encoding="utf-8", errors="replace") for name in source.sizes}
    text = "\n".join(files.values())[:TEXT_CHARACTERS]
    (folder / "text.txt").write_text(text, encoding="utf-8")
    records: dict[str, list[dict[str, Any]]] = {"train": [], "heldout": []}
    for name in _names(files):
        split = "heldout" if int(path_hash(name.name), 16) % HELD_OUT == 0 else "train"
        records[split] += _records(name)
    for split, made in records.items():
        lines = "".join(json.dumps(record) + "\n" for record in made)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    questions = [text for made in records["train"] for text in _texts(made)]
    _save_tokenizer(folder / "base", [text, *questions])
    _save_model(folder / "base")
    return f"{folder}: {len(records['train'])} conversations to train on, {len(records['heldout'])} held out"


def _names(files: dict[str, str]) -> Iterator[Name]:
    """Public classes and functions at the top of each file, by file and position; each name once."""
    seen: set[str] = set()
    for path, text in files.items():
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError):
            continue
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_") or node.name in seen:
                continue
            seen.add(node.name)
            yield Name(module, node.name, "class" if isinstance(node, ast.ClassDef) else "function")


def _records(name: Name) -> list[dict[str, Any]]:
    """The conversations about a name: two of a prompt and a response, two of messages, one of them with two turns."""
    where = f"{name.module}.{name.name}"
    line = f"from {name.module} import {name.name}"
    spelled = " ".join(name.name)
    return [
        {"prompt": f"Import {where}.", "response": line},
        {"prompt": f"Spell {name.name}.", "response": spelled},
        {"messages": [_user(f"What is {where}?"), _assistant(f"{name.name} is a {name.kind} of {name.module}.")]},
        {
            "messages": [
                {"role": "system", "content": "You know Python."},
                *(_user(f"Where is {where}?"), _assistant(name.module)),
                *(_user("Import it."), _assistant(line)),
            ]
        },
    ]


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _texts(record: dict[str, Any]) -> list[str]:
    return [message["content"] for message in record.get("messages", [])] or [record["prompt"], record["response"]]


def _save_tokenizer(folder: Path, texts: list[str]) -> None:
    """A byte-level BPE tokenizer trained on `texts`, as transformers saves one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=BEGIN, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def _save_model(folder: Path) -> None:
    """A Llama with weights drawn from a fixed seed."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    AutoModelForCausalLM.from_config(LlamaConfig(**MODEL, **ends)).save_pretrained(folder)
