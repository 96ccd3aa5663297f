"""Makes a corpus from plain text files: whole files held out, or the tail of a single one.

Called by `build` for data.kind=text.
Must never put one file in both splits, except the tail of a corpus of one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launcher.errors import Problem, UserError, raise_if
from recipes.shared.data.blocks import read_blocks, tail_start
from recipes.shared.data.encode import check_tokenizer
from recipes.shared.data.files import check_fraction, common_names, expand, hold_out, stamp, stamp_tree
from recipes.shared.data.meta import DataMeta
from recipes.shared.data.writer import Piece, Split, write_corpus


class Span(NamedTuple):
    """Bytes start .. end - 1 of one file: one document of one split."""

    split: Split
    path: Path
    start: int
    end: int


class TextSource:
    """The options of conf/data/text.yaml."""

    def __init__(
        self,
        *,
        files: Sequence[str],
        validation_files: Sequence[str],
        validation_fraction: float,
        tokenizer: str | None,
    ) -> None:
        """Raises: UserError with everything wrong about the options."""
        self.tokenizer = tokenizer
        self.fraction = validation_fraction
        self.train_files, self.validation_files = resolve_files(
            files, validation_files, validation_fraction, tokenizer, "docs/*.txt"
        )

    def fingerprint(self) -> dict[str, Any]:
        """All that determines the tokens, without reading a file."""
        return file_fingerprint(self.train_files, self.validation_files, self.fraction, self.tokenizer)

    def write(self, folder: Path) -> DataMeta:
        """Writes both splits into `folder`. Raises UserError for an empty corpus or text that is not UTF-8."""
        spans, held = self._spans()
        unit = "bytes" if self.tokenizer is None else "tokens"
        num_files = len(self.train_files) + len(self.validation_files)
        source = f"{num_files} text file{'s' if num_files > 1 else ''} as {unit}, {held}"
        return write_corpus(self._pieces(spans), folder, self.tokenizer, source)

    def _spans(self) -> tuple[list[Span], str]:
        """What goes where, and how validation was held out, in words."""
        sizes = {file: file.stat().st_size for file in (*self.train_files, *self.validation_files)}
        if self.validation_files:
            held, words = set(self.validation_files), "validation files named"
        elif sum(size > 0 for size in sizes.values()) > 1:
            names = common_names(self.train_files)
            chosen = hold_out({name: sizes[file] for name, file in names.items()}, self.fraction)
            held, words = {names[name] for name in chosen}, f"{len(chosen)} held out whole for validation"
        else:
            return self._tail_spans(), f"the last {self.fraction:.3g} of it held out for validation"
        return [Span("validation" if f in held else "train", f, 0, size) for f, size in sizes.items() if size], words

    def _tail_spans(self) -> list[Span]:
        spans: list[Span] = []
        for file in self.train_files:
            size = file.stat().st_size
            if size:
                cut = tail_start(file, self.fraction)
                spans += [Span("train", file, 0, cut), Span("validation", file, cut, size)]
        return spans

    def _pieces(self, spans: list[Span]) -> Iterator[Piece]:
        for span in spans:
            offset = span.start
            for block in read_blocks(span.path, span.start, span.end):
                if self.tokenizer is not None:
                    _check_utf8(block, span.path, offset)
                offset += len(block)
                yield Piece(span.split, block, last=offset >= span.end)


def _check_utf8(block: bytes, path: Path, offset: int) -> None:
    try:
        block.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            Problem(
                where="data.files",
                got=f"{path}, byte {offset + error.start}",
                why="the file is not UTF-8 text, which a tokenizer needs",
                fix="convert it (iconv -t utf-8), leave it out, or read raw bytes with data.tokenizer=null",
            )
        ) from error


def resolve_files(
    files: Sequence[str],
    validation_files: Sequence[str],
    fraction: float,
    tokenizer: str | None,
    example: str,
) -> tuple[list[Path], list[Path]]:
    """Training and validation files, sorted. `example` is a glob that shows the user what to write.

    Raises: UserError with all of: no files, a name or glob without a file, a file in both lists, a fraction outside
    (0, 1) when it is needed, a tokenizer folder that is missing or empty.
    """
    problems: list[Problem] = []
    if not files:
        problems.append(
            Problem("data.files", "[]", "this kind of data needs at least one file", f"data.files=[{example}]")
        )
    train = expand("data.files", files, problems)
    validation = expand("data.validation_files", validation_files, problems)
    if not validation_files:
        check_fraction(fraction, problems)
    check_tokenizer(tokenizer, problems)
    resolved = {file.resolve() for file in train}
    both = [str(file) for file in validation if file.resolve() in resolved]
    if both:
        why = "these files are in data.files too: the validation loss would be measured on training text"
        fix = "name the training files without them, or leave data.validation_files empty"
        problems.append(Problem("data.validation_files", ", ".join(both), why, fix))
    raise_if(problems)
    return train, validation


def file_fingerprint(
    train: Sequence[Path], validation: Sequence[Path], fraction: float, tokenizer: str | None
) -> dict[str, Any]:
    """What determines the tokens of a corpus made from files, except options of the kind's own."""
    return {
        "train": stamp(train),
        "validation": stamp(validation),
        "validation_fraction": None if validation else fraction,
        "tokenizer": None if tokenizer is None else stamp_tree(Path(tokenizer)),
    }
