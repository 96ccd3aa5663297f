"""Makes the two splits of a prepared corpus, ready to be read, from its cache folder and the sequence length.

Called by recipes on every rank, after one process per host has called `build.prepare`.
Must never build or change anything on disk.
"""

from __future__ import annotations

from pathlib import Path

from launcher.errors import Problem, raise_if
from recipes.shared.data.conversations import Conversations
from recipes.shared.data.layouts import Packed, Padded
from recipes.shared.data.meta import CONVERSATIONS, DataMeta, read_meta
from recipes.shared.data.samples import Samples
from recipes.shared.data.windows import TokenWindows


def open_corpus(folder: Path, sequence_length: int) -> tuple[DataMeta, TokenWindows, TokenWindows]:
    """Opens what `prepare` returned: (meta, training windows, validation windows).

    Not collective: every rank calls it and maps the same files.
    Raises: UserError when a split is shorter than one sample; FileNotFoundError when nothing was prepared there.
    """
    meta = read_meta(folder)
    check_length(folder, meta, sequence_length)
    train = TokenWindows(folder / meta.train_file, sequence_length, dtype=meta.dtype, num_tokens=meta.train_tokens)
    validation = TokenWindows(
        folder / meta.validation_file,
        sequence_length,
        dtype=meta.dtype,
        start=meta.validation_start,
        num_tokens=meta.validation_tokens,
    )
    return meta, train, validation


def open_conversations(folder: Path, sequence_length: int, packing: bool) -> tuple[DataMeta, Packed | Padded, Padded]:
    """Opens what `prepare` returned for data.kind=chat: (meta, training samples, validation samples).

    Validation samples are never packed: the loss of an evaluation is one of the same conversations whatever `packing`.
    Not collective. Raises: UserError when no conversation of a split has a response within sequence_length tokens.
    """
    meta = read_meta(folder)
    train, validation = _conversations(folder, meta, sequence_length)
    kind = Packed if packing else Padded
    return meta, kind(train, sequence_length, meta.pad), Padded(validation, sequence_length, meta.pad)


def open_validation(folder: Path, sequence_length: int) -> Samples:
    """The validation samples of any kind of corpus, as an evaluation reads them."""
    if read_meta(folder).layout == CONVERSATIONS:
        return open_conversations(folder, sequence_length, packing=False)[2]
    return open_corpus(folder, sequence_length)[2]


def check_length(folder: Path, meta: DataMeta, sequence_length: int) -> None:
    """Raises UserError unless both splits hold at least one sample of sequence_length tokens."""
    if meta.layout == CONVERSATIONS:
        _conversations(folder, meta, sequence_length)
        return
    fixes = {
        "training": ("train_tokens", "a smaller train.sequence_length, or more data"),
        "validation": (
            "validation_tokens",
            "a smaller train.sequence_length, a larger data.validation_fraction, or more validation data",
        ),
    }
    problems = []
    for split, (field, fix) in fixes.items():
        num_tokens = getattr(meta, field)
        if num_tokens < sequence_length:
            problems.append(
                Problem(
                    where="train.sequence_length",
                    got=f"{sequence_length} tokens per sample; the {split} split holds {num_tokens} tokens",
                    why=f"the {split} split of the corpus is shorter than one sample ({meta.source})",
                    fix=fix,
                )
            )
    raise_if(problems)


def _conversations(folder: Path, meta: DataMeta, sequence_length: int) -> tuple[Conversations, Conversations]:
    splits = {
        "training": (meta.train_file, meta.train_samples),
        "validation": (meta.validation_file, meta.validation_samples),
    }
    opened = {
        split: Conversations(folder / file, sequence_length, meta.dtype, count)
        for split, (file, count) in splits.items()
    }
    raise_if(
        [
            Problem(
                where="train.sequence_length",
                got=f"{sequence_length} tokens per sample",
                why=f"none of the {found.dropped} conversations of the {split} split has a response within them",
                fix="a larger train.sequence_length",
            )
            for split, found in opened.items()
            if not len(found)
        ]
    )
    return opened["training"], opened["validation"]
