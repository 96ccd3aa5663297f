"""Makes a corpus from JSON Lines files: one object per line, its text in one field, whole records held out.

Called by `build` for data.kind=jsonl.
Must never skip a line it cannot read: only blank lines are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.shared.data.kinds.records import json_records, record_piece, split_of
from recipes.shared.data.kinds.text import file_fingerprint, resolve_files
from recipes.shared.data.meta import DataMeta
from recipes.shared.data.writer import Piece, write_corpus


class JsonlSource:
    """The options of conf/data/jsonl.yaml."""

    def __init__(
        self,
        *,
        files: Sequence[str],
        validation_files: Sequence[str],
        validation_fraction: float,
        field: str,
        tokenizer: str | None,
    ) -> None:
        """Raises: UserError with everything wrong about the options."""
        self.tokenizer = tokenizer
        self.field = field
        self.fraction = validation_fraction
        self.train_files, self.validation_files = resolve_files(
            files, validation_files, validation_fraction, tokenizer, "corpus/*.jsonl"
        )

    def fingerprint(self) -> dict[str, Any]:
        """All that determines the tokens, without reading a file."""
        files = file_fingerprint(self.train_files, self.validation_files, self.fraction, self.tokenizer)
        return {"field": self.field, **files}

    def write(self, folder: Path) -> DataMeta:
        """Writes both splits into `folder`. Raises UserError for an empty corpus or a line that cannot be used."""
        unit = "bytes" if self.tokenizer is None else "tokens"
        num_files = len(self.train_files) + len(self.validation_files)
        held = "validation files named" if self.validation_files else f"{self.fraction:.3g} of the records held out"
        source = f"records of {num_files} JSONL file{'s' if num_files > 1 else ''} as {unit}, {held}"
        return write_corpus(self._pieces(), folder, self.tokenizer, source)

    def _pieces(self) -> Iterator[Piece]:
        index = 0
        for file in self.train_files:
            for record, place in json_records(file, "data.files"):
                split = "train" if self.validation_files else split_of(index, self.fraction)
                yield record_piece(record, self.field, split, "data.files", place)
                index += 1
        for file in self.validation_files:
            for record, place in json_records(file, "data.validation_files"):
                yield record_piece(record, self.field, "validation", "data.validation_files", place)
