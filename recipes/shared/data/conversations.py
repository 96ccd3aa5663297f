"""The conversations of one split on disk: written as a stream, read through memory maps, cut to a length when opened.

Three files: tokens, one byte a token that tells responses, and (end, first response, responses) of each conversation.
Must never load the tokens into memory, or let a conversation through of which no response token is left.
"""

from __future__ import annotations

import array
import hashlib
import os
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from recipes.shared.data.conversation import Encoded
from recipes.shared.data.writer import TokenCounter

Int64s = npt.NDArray[np.int64]

FIELDS = 3  # of the index, each int64
RESPONSES, INDEX = ".responses", ".index"  # beside the tokens' file


class ConversationWriter:
    """Appends conversations to the three files of a split; only the index is kept in memory."""

    def __init__(self, tokens: Path, vocab_size: int, dtype: str) -> None:
        """Creates the files, or empties them. `tokens`: the file of tokens; the others are named after it."""
        self.counter = TokenCounter(vocab_size, dtype)  # of the responses: what a model without context could know
        self.num_tokens = self.num_samples = 0
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._hash = hashlib.blake2b(digest_size=16)
        self._index = array.array("q")
        self._path = tokens
        self._files = [tokens.open("wb"), tokens.with_suffix(RESPONSES).open("wb")]

    def append(self, sample: Encoded) -> None:
        """Adds one conversation at the end."""
        stored = (sample.tokens.astype(self._dtype), sample.responses.astype(np.uint8))
        for file, part in zip(self._files, stored, strict=True):
            file.write(part.data)
            self._hash.update(part.data)
        self.counter.add(sample.tokens[sample.responses])
        self.num_tokens += sample.tokens.size
        self.num_samples += 1
        self._index.extend((self.num_tokens, int(np.argmax(sample.responses)), int(sample.responses.sum())))

    def digest(self) -> str:
        """Hash of everything so far, where each conversation ends included."""
        whole = self._hash.copy()
        whole.update(self._index.tobytes())
        return whole.hexdigest()

    def __enter__(self) -> ConversationWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                with self._path.with_suffix(INDEX).open("wb") as index:
                    index.write(np.frombuffer(self._index, dtype=np.int64).astype("<i8").data)
                    for file in (*self._files, index):
                        file.flush()
                        os.fsync(file.fileno())  # the folder's rename must not reach the disk before them
        finally:
            for file in self._files:
                file.close()


class Conversations:
    """A split cut to `sequence_length` tokens: the conversations of which a response token is left, in their order."""

    def __init__(self, tokens: Path, sequence_length: int, dtype: str, num_samples: int) -> None:
        """Maps the files that a ConversationWriter made."""
        index = np.fromfile(tokens.with_suffix(INDEX), dtype="<i8").reshape(num_samples, FIELDS)
        ends, first, counts = (np.ascontiguousarray(column) for column in index.T)
        starts = np.concatenate([[0], ends[:-1]])
        self._tokens = np.memmap(tokens, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
        self._responses = np.memmap(tokens.with_suffix(RESPONSES), dtype=np.uint8, mode="r")
        long = np.flatnonzero(ends - starts > sequence_length)
        for number in long:  # each has to be looked at; the others were counted when they were written
            start = starts[number]
            counts[number] = self._responses[start : start + sequence_length].sum()
        kept = counts > 0
        self.dropped = int((~kept).sum())
        """How many have no response within the length."""
        self.truncated = int(kept[long].sum())
        """How many lost their end."""
        self.starts: Int64s = starts[kept]
        self.lengths: Int64s = np.minimum(ends - starts, sequence_length)[kept]
        """Tokens of each, int64 [len]."""
        self.counts: Int64s = counts[kept]
        """Response tokens of each, int64 [len]."""
        self._first: Int64s = first[kept]

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, number: int) -> Encoded:
        """Tokens of one conversation, and which are responses."""
        part = slice(int(self.starts[number]), int(self.starts[number] + self.lengths[number]))
        return Encoded(self._tokens[part].astype(np.int64), self._responses[part].astype(np.bool_))

    def prompt(self, number: int) -> tuple[Int64s, Int64s]:
        """What comes before the first response of a conversation, and that response."""
        tokens, responses = self.read(number)
        first = int(self._first[number])
        stops = np.flatnonzero(~responses[first:])
        return tokens[:first], tokens[first : first + int(stops[0]) if stops.size else tokens.size]
