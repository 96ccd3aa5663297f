"""Makes token ids from text: raw bytes, or a Hugging Face tokenizer read from a local folder.

Called by `writer.write_corpus`; the kinds in `kinds/` name the tokenizer.
Must never reach the network, and never run code that comes with a tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from launcher.errors import Problem, UserError

Tokens = npt.NDArray[np.integer[Any]]

# Form feed: one byte below 256 that separates pages by its own definition and hardly occurs inside documents.
BYTE_SEPARATOR = 0x0C


class Encoder(Protocol):
    """Turns UTF-8 text into ids."""

    vocab_size: int  # ids are < vocab_size
    separator: int | None  # id written after every document, None for no separator

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """One array [num_tokens] per text, without separators."""
        ...


class ByteEncoder:
    """One token per byte, 256 ids; documents are separated by a form feed."""

    vocab_size = 256
    separator: int | None = BYTE_SEPARATOR

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """uint8 [num_bytes] per text."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]


class FolderEncoder:
    """A Hugging Face tokenizer from a local folder; documents end with its eos token if it has one.

    No other special token is added. A long plain-text file is encoded in blocks of whole lines, so a token that
    would span two lines at a block's edge (one per MiB) is written as two.
    """

    def __init__(self, folder: str) -> None:
        """Raises: UserError (where="data.tokenizer") when transformers cannot load it."""
        from transformers import AutoTokenizer  # deferred: takes a second, and byte corpora do not need it

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises many kinds here: OSError, ValueError, KeyError, its parsers'
            raise UserError(_unreadable(folder, f"transformers cannot load it: {_first_line(error)}")) from error
        highest = max(self.tokenizer.get_vocab().values(), default=-1)  # len() is less when ids have gaps
        self.vocab_size = max(len(self.tokenizer), highest + 1)
        self.separator: int | None = self.tokenizer.eos_token_id
        if self.vocab_size < 1:
            raise UserError(_unreadable(folder, "its vocabulary is empty"))

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """int64 [num_tokens] per text."""
        strings = [text.decode("utf-8") for text in texts]
        # verbose=False: the warning about the model's maximum length is not about a corpus
        ids = self.tokenizer(strings, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.asarray(row, dtype=np.int64) for row in ids]


def check_tokenizer(tokenizer: str | None, problems: list[Problem]) -> None:
    """Appends a Problem (where="data.tokenizer") unless `tokenizer` is None or a folder with files in it."""
    if tokenizer is None:
        return
    path = Path(tokenizer)
    if not path.is_dir():
        why = "it is a file, and a folder is needed" if path.exists() else "the folder does not exist"
        problems.append(_unreadable(tokenizer, why))
    elif not any(path.iterdir()):
        problems.append(_unreadable(tokenizer, "the folder is empty"))


def make_encoder(tokenizer: str | None) -> Encoder:
    """The encoder that data.tokenizer names: None for bytes. Raises UserError for a folder that cannot be loaded."""
    return ByteEncoder() if tokenizer is None else FolderEncoder(tokenizer)


def _unreadable(folder: str, why: str) -> Problem:
    return Problem(
        where="data.tokenizer",
        got=folder,
        why=why,
        fix="a local folder written by tokenizer.save_pretrained(), or null for bytes",
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
