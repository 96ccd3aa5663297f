"""Makes a corpus from files that are tokenised already: they are read in place, only checked and counted.

Called by `build` for data.kind=tokens.
Must never copy or change the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from launcher.errors import Problem, UserError, raise_if
from recipes.shared.data.files import check_fraction, stamp
from recipes.shared.data.meta import DataMeta
from recipes.shared.data.writer import TokenCounter

CHUNK_TOKENS = 4 << 20
DTYPES = ("uint16", "uint32")
NUMPY_MAGIC = b"\x93NUMPY"  # first bytes of a .npy file


class TokensSource:
    """The options of conf/data/tokens.yaml."""

    def __init__(
        self, *, train: str, validation: str | None, validation_fraction: float, dtype: str, vocab_size: int
    ) -> None:
        """Raises: UserError with everything wrong about the options and the files' sizes."""
        problems: list[Problem] = []
        if dtype not in DTYPES:
            why = "tokens are stored as one of these types"
            problems.append(Problem("data.dtype", str(dtype), why, " or ".join(f"data.dtype={d}" for d in DTYPES)))
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
            why = "the vocabulary size is a whole number of ids, at least 1"
            problems.append(Problem("data.vocab_size", repr(vocab_size), why, "the vocabulary size of the tokenizer"))
        if validation is None:
            check_fraction(validation_fraction, problems)
        self.train, self.validation = Path(train), None if validation is None else Path(validation)
        item_bytes = np.dtype(dtype).itemsize if dtype in DTYPES else 1
        _check_file("data.train", self.train, item_bytes, problems)
        if self.validation is not None:
            _check_file("data.validation", self.validation, item_bytes, problems)
            if self.validation.resolve() == self.train.resolve():
                why, fix = "it is the training file", "data.validation=null holds out the tail of the training file"
                problems.append(Problem("data.validation", str(validation), why, fix))
        raise_if(problems)
        self.dtype, self.vocab_size, self.fraction = dtype, vocab_size, validation_fraction

    def fingerprint(self) -> dict[str, Any]:
        """All that determines the tokens, without reading a file."""
        return {
            "train": stamp([self.train]),
            "validation": None if self.validation is None else stamp([self.validation]),
            "validation_fraction": self.fraction if self.validation is None else None,
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
        }

    def write(self, folder: Path) -> DataMeta:
        """Reads the files once (ids checked, unigrams counted); nothing is written to `folder`.

        Raises: UserError for an id that is not below data.vocab_size.
        """
        num_tokens = self.train.stat().st_size // np.dtype(self.dtype).itemsize
        if self.validation is None:
            start = min(num_tokens - 1, int(num_tokens * (1 - self.fraction)))
            train, tail = self._count("data.train", self.train, 0, start), self.train
            validation = self._count("data.train", tail, start, num_tokens)
            held = f"the last {self.fraction:.3g} of it held out for validation"
        else:
            start, tail = 0, self.validation
            train = self._count("data.train", self.train, 0, num_tokens)
            num_tokens = tail.stat().st_size // np.dtype(self.dtype).itemsize
            validation = self._count("data.validation", tail, 0, num_tokens)
            held = f"validated on {tail}"
        return DataMeta(
            vocab_size=self.vocab_size,
            train_tokens=train.num_tokens,
            validation_tokens=validation.num_tokens,
            unigram_entropy=train.entropy(),
            source=f"tokens of {self.train}, {held}",
            tokenizer=None,
            digest=f"{train.digest()}-{validation.digest()}",
            dtype=self.dtype,
            train_file=str(self.train.absolute()),
            validation_file=str(tail.absolute()),
            validation_start=start,
        )

    def _count(self, where: str, path: Path, start: int, end: int) -> TokenCounter:
        """Counts tokens start .. end - 1 of `path`."""
        counter = TokenCounter(self.vocab_size, self.dtype)
        item = np.dtype(self.dtype).newbyteorder("<")
        with path.open("rb") as file:
            file.seek(start * item.itemsize)
            for first in range(start, end, CHUNK_TOKENS):
                tokens = np.frombuffer(file.read(min(CHUNK_TOKENS, end - first) * item.itemsize), dtype=item)
                _check_ids(where, path, tokens, first, self.vocab_size)
                counter.add(tokens)
        return counter


def _check_ids(where: str, path: Path, tokens: np.ndarray[Any, Any], first: int, vocab_size: int) -> None:
    """Raises UserError for an id >= vocab_size; `first` is the position in `path` of tokens[0]."""
    if int(tokens.max(initial=0)) < vocab_size:
        return
    position = int(np.argmax(tokens >= vocab_size))
    raise UserError(
        Problem(
            where=where,
            got=f"id {int(tokens[position])} at token {first + position} of {path}",
            why=f"ids must be below data.vocab_size={vocab_size}",
            fix="data.vocab_size= the vocabulary size of the tokenizer that wrote the file, or another data.dtype",
        )
    )


def _check_file(where: str, path: Path, item_bytes: int, problems: list[Problem]) -> None:
    """Appends a Problem for a file that is missing, empty, has a numpy header or is no whole number of tokens."""
    if not path.is_file():
        problems.append(Problem(where, str(path), "the file does not exist", "correct the path"))
        return
    size = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(len(NUMPY_MAGIC))
    if size == 0:
        problems.append(Problem(where, str(path), "the file is empty", "name a file with tokens in it"))
    elif magic == NUMPY_MAGIC:
        why = "it is a .npy file, whose header would be read as tokens"
        problems.append(Problem(where, str(path), why, "write the bare tokens: numpy.load(path).tofile(other)"))
    elif size % item_bytes:
        why = f"its {size} bytes are no whole number of {item_bytes}-byte tokens"
        problems.append(Problem(where, str(path), why, "the data.dtype it was written with, or an undamaged copy"))
