"""Makes a corpus of conversations from JSON Lines files, of which responses alone are learned.

Called by `build` for data.kind=chat.
Must never skip a record: one that cannot be used is an error with its file and line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import Problem, UserError, raise_if
from recipes.shared.data.conversation import ChatEncoder, messages_of
from recipes.shared.data.conversations import ConversationWriter
from recipes.shared.data.kinds.records import json_records, split_of
from recipes.shared.data.kinds.text import file_fingerprint, resolve_files
from recipes.shared.data.meta import CONVERSATIONS, DataMeta
from recipes.shared.data.writer import Split, token_dtype


class ChatSource:
    """The options of conf/data/chat.yaml."""

    def __init__(
        self,
        *,
        files: Sequence[str],
        validation_files: Sequence[str],
        validation_fraction: float,
        tokenizer: str | None,
        chat_template: str | None,
        packing: object,
    ) -> None:
        """Raises: UserError with everything wrong about the options. `packing` matters when the corpus is read."""
        problems: list[Problem] = []
        if tokenizer is None:
            why = "conversations become tokens by a tokenizer and its chat template"
            problems.append(Problem("data.tokenizer", "null", why, "data.tokenizer= a folder with a tokenizer"))
        if chat_template is not None and not Path(chat_template).is_file():
            why, fix = "there is no such file", "the path of a Jinja file, or null for the tokenizer's own template"
            problems.append(Problem("data.chat_template", chat_template, why, fix))
        if not isinstance(packing, bool):
            problems.append(Problem("data.packing", repr(packing), "it is true or false", "data.packing=true"))
        try:
            self.train_files, self.validation_files = resolve_files(
                files, validation_files, validation_fraction, tokenizer, "chats/*.jsonl"
            )
        except UserError as error:
            problems += error.problems
        raise_if(problems)
        assert tokenizer is not None
        self.tokenizer, self.template, self.fraction = tokenizer, chat_template, validation_fraction

    def fingerprint(self) -> dict[str, Any]:
        """All that determines tokens and labels, without reading a conversation."""
        files = file_fingerprint(self.train_files, self.validation_files, self.fraction, self.tokenizer)
        return {"template": None if self.template is None else Path(self.template).read_text(encoding="utf-8"), **files}

    def write(self, folder: Path) -> DataMeta:
        """Writes both splits into `folder`. Raises UserError for a record or a tokenizer that cannot be used."""
        encoder = ChatEncoder(self.tokenizer, self.template)
        dtype = token_dtype(encoder.vocab_size)
        with (
            ConversationWriter(folder / "train.bin", encoder.vocab_size, dtype) as train,
            ConversationWriter(folder / "validation.bin", encoder.vocab_size, dtype) as validation,
        ):
            writers: dict[Split, ConversationWriter] = {"train": train, "validation": validation}
            for record, split, where, place in self._records():
                writers[split].append(encoder.encode(messages_of(record, where, place), where, place))
        source = self._source()
        for split, writer in writers.items():
            if not writer.num_samples:
                fix = "more records, or validation data of its own (data.validation_files)"
                raise UserError(Problem("data", source, f"the {split} split holds no conversation", fix))
        return DataMeta(
            vocab_size=encoder.vocab_size,
            train_tokens=train.num_tokens,
            validation_tokens=validation.num_tokens,
            unigram_entropy=train.counter.entropy(),
            source=source,
            tokenizer=self.tokenizer,
            digest=f"{train.digest()}-{validation.digest()}",
            dtype=dtype,
            layout=CONVERSATIONS,
            train_samples=train.num_samples,
            validation_samples=validation.num_samples,
            pad=encoder.pad,
            ends=sorted(encoder.ends),
        )

    def _records(self) -> Iterator[tuple[dict[str, Any], Split, str, str]]:
        """(record, split, option, "file:line") of every record."""
        index = 0
        for file in self.train_files:
            for record, place in json_records(file, "data.files"):
                yield record, "train" if self.validation_files else split_of(index, self.fraction), "data.files", place
                index += 1
        for file in self.validation_files:
            for record, place in json_records(file, "data.validation_files"):
                yield record, "validation", "data.validation_files", place

    def _source(self) -> str:
        num_files = len(self.train_files) + len(self.validation_files)
        held = "validation files named" if self.validation_files else f"{self.fraction:.3g} of the records held out"
        return f"conversations of {num_files} JSONL file{'s' if num_files > 1 else ''}, {held}"
