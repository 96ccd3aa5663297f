"""Conversations of words and a tokenizer with one token a word, so that every label can be written down by hand.

Used by the tests of conversations and of fine-tuning.
Must never need more than the tokenizers library.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

WORDS = ["<pad>", "<s>", "<end>", "user:", "assistant:", "system:", "end.", *(f"w{number}" for number in range(90))]
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m['role'] + ': ' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + ' <end>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' <end>' }}{% endif %}{{ ' ' }}{% endfor %}"
)


def word_tokenizer(folder: Path) -> Path:
    """Saves a tokenizer of WORDS with the template PLAIN in `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(folder)
    return folder


def conversation(*turns: str) -> dict[str, Any]:
    """`turns` are spoken in turn, the first by the user; one that begins with "system" is none of theirs."""
    messages: list[dict[str, str]] = []
    speakers = itertools.cycle(("user", "assistant"))
    for turn in turns:
        role = "system" if turn.startswith("system") else next(speakers)
        messages.append({"role": role, "content": turn.removeprefix("system ")})
    return {"messages": messages}


def written(path: Path, *records: Any) -> str:
    """A JSON Lines file of `records`."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)
