"""Makes train.bin, validation.bin and their DataMeta from a stream of text pieces.

Called by the corpus kinds in `kinds/` that read text.
Must never hold more of the corpus in memory than one batch of pieces and one buffer of tokens per split.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import numpy.typing as npt

from launcher.errors import Problem, UserError
from recipes.shared.data.encode import Tokens, make_encoder
from recipes.shared.data.meta import DataMeta

Split = Literal["train", "validation"]

BATCH_BYTES = 4 << 20  # text given to the tokenizer at once: enough for its threads, little memory
BATCH_PIECES = 1024
BUFFER_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one document, in order."""

    split: Split
    text: bytes  # valid UTF-8 unless the corpus is read as bytes
    last: bool  # the document ends here


class TokenCounter:
    """Running count, unigram counts (int64 [vocab_size]) and hash of a stream of tokens."""

    def __init__(self, vocab_size: int, dtype: str) -> None:
        """Starts at nothing; `dtype` is that of the tokens on disk."""
        self.num_tokens = 0
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self._hash = hashlib.blake2b(digest_size=16)
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def add(self, tokens: Tokens) -> npt.NDArray[np.unsignedinteger]:
        """Counts `tokens` ([n], every id < vocab_size) and returns them as they lie on disk."""
        assert tokens.size == 0 or int(tokens.max()) < self.counts.size, "a token id is outside the vocabulary"
        self.num_tokens += tokens.size
        self.counts += np.bincount(tokens, minlength=self.counts.size)
        stored = tokens.astype(self._dtype)
        self._hash.update(stored.data)
        return stored

    def entropy(self) -> float:
        """Nats per token of the unigram distribution: -sum p log p."""
        share = self.counts[self.counts > 0] / max(1, self.num_tokens)
        return float(-(share * np.log(share)).sum()) + 0.0  # + 0.0 turns -0.0 into 0.0

    def digest(self) -> str:
        """Hash of the tokens so far."""
        return self._hash.hexdigest()


class TokenWriter:
    """Appends tokens to one file; nothing but a buffer of about BUFFER_TOKENS is kept in memory."""

    def __init__(self, path: Path, vocab_size: int, dtype: str) -> None:
        """Creates `path`, or empties it."""
        self.counter = TokenCounter(vocab_size, dtype)
        self._file = path.open("wb")
        self._pending: list[Tokens] = []
        self._num_pending = 0

    def append(self, tokens: Tokens) -> None:
        """Adds `tokens` [n] at the end."""
        self._pending.append(tokens)
        self._num_pending += tokens.size
        if self._num_pending >= BUFFER_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._file.write(self.counter.add(np.concatenate(self._pending)).data)
        self._pending, self._num_pending = [], 0

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._flush()
                self._file.flush()
                os.fsync(self._file.fileno())  # the folder's rename must not reach the disk before the tokens
        finally:
            self._file.close()


def token_dtype(vocab_size: int) -> str:
    """The smallest type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_corpus(pieces: Iterable[Piece], folder: Path, tokenizer: str | None, source: str) -> DataMeta:
    """Encodes `pieces` into <folder>/train.bin and validation.bin and returns their DataMeta.

    Raises: UserError when the tokenizer cannot be loaded, when there is no training text or no validation text, and
    whatever the pieces raise.
    """
    encoder = make_encoder(tokenizer)
    dtype = token_dtype(encoder.vocab_size)
    separator = None if encoder.separator is None else np.array([encoder.separator], dtype=np.int64)
    with (
        TokenWriter(folder / "train.bin", encoder.vocab_size, dtype) as train,
        TokenWriter(folder / "validation.bin", encoder.vocab_size, dtype) as validation,
    ):
        writers = {"train": train, "validation": validation}
        num_bytes = {"train": 0, "validation": 0}
        for batch in _batches(pieces):
            for piece, tokens in zip(batch, encoder.encode([piece.text for piece in batch]), strict=True):
                num_bytes[piece.split] += len(piece.text)
                writers[piece.split].append(tokens)
                if piece.last and separator is not None:
                    writers[piece.split].append(separator)
    _check_not_empty(num_bytes, source)
    return DataMeta(
        vocab_size=encoder.vocab_size,
        train_tokens=train.counter.num_tokens,
        validation_tokens=validation.counter.num_tokens,
        unigram_entropy=train.counter.entropy(),
        source=source,
        tokenizer=tokenizer,
        digest=f"{train.counter.digest()}-{validation.counter.digest()}",
        dtype=dtype,
    )


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_BYTES or len(batch) >= BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_not_empty(num_bytes: dict[str, int], source: str) -> None:
    """Raises UserError when a split got no text; num_bytes maps split -> bytes of text."""
    if sum(num_bytes.values()) == 0:
        raise UserError(Problem("data", source, "the corpus holds no text", "name files or records that are not empty"))
    for split in ("train", "validation"):
        if num_bytes[split] == 0:
            fix = "more documents, or validation data of its own (data.validation_files or data.validation_split)"
            raise UserError(Problem("data", source, f"the {split} split holds no text", fix))
