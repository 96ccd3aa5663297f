"""Makes a corpus from a Hugging Face dataset: by hub name, from a local folder, or from files the library can read.

Called by `build` for data.kind=hub.
Must never import `datasets` before a dataset is really read: it is an optional dependency and takes seconds.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import Problem, UserError, raise_if
from recipes.shared.data.encode import check_tokenizer
from recipes.shared.data.files import check_fraction, stamp, stamp_tree
from recipes.shared.data.kinds.records import record_piece, split_of
from recipes.shared.data.meta import DataMeta
from recipes.shared.data.writer import Piece, write_corpus

DataFiles = str | Sequence[str] | Mapping[str, str | Sequence[str]] | None


class HubSource:
    """The options of conf/data/hub.yaml."""

    def __init__(
        self,
        *,
        path: str,
        name: str | None,
        data_files: DataFiles,
        split: str,
        validation_split: str | None,
        validation_fraction: float,
        field: str,
        tokenizer: str | None,
    ) -> None:
        """Raises: UserError with everything wrong about the options."""
        problems: list[Problem] = []
        if validation_split is None:
            check_fraction(validation_fraction, problems)
        elif validation_split == split:
            why = "it is the training split: the validation loss would be measured on training text"
            fix = "another split, or data.validation_split=null to hold out data.validation_fraction of the records"
            problems.append(Problem("data.validation_split", validation_split, why, fix))
        check_tokenizer(tokenizer, problems)
        raise_if(problems)
        self.path, self.name, self.data_files = path, name, data_files
        self.split, self.validation_split, self.fraction = split, validation_split, validation_fraction
        self.field, self.tokenizer = field, tokenizer

    def fingerprint(self) -> dict[str, Any]:
        """All that determines the tokens as far as it is known on this machine.

        A dataset on the hub is known by its name alone: a corpus that was built stays as it was fetched.
        """
        return {
            "dataset": [self.path, self.name, self.data_files, self.split, self.validation_split, self.field],
            "folder": stamp_tree(Path(self.path)) if Path(self.path).is_dir() else None,
            "data_files": stamp(_local_files(self.data_files)),
            "validation_fraction": self.fraction if self.validation_split is None else None,
            "tokenizer": None if self.tokenizer is None else stamp_tree(Path(self.tokenizer)),
        }

    def write(self, folder: Path) -> DataMeta:
        """Writes both splits into `folder`.

        Raises: UserError when `datasets` is missing, cannot load the dataset, or a record cannot be used.
        """
        unit = "bytes" if self.tokenizer is None else "tokens"
        if self.validation_split is None:
            held = f"{self.fraction:.3g} of the records held out for validation"
        else:
            held = f"validated on split {self.validation_split}"
        name = self.path if self.name is None else f"{self.path} ({self.name})"
        source = f"dataset {name}, split {self.split} as {unit}, {held}"
        return write_corpus(self._pieces(), folder, self.tokenizer, source)

    def _pieces(self) -> Iterator[Piece]:
        for index, record in enumerate(self._load("data.split", self.split)):
            split = split_of(index, self.fraction) if self.validation_split is None else "train"
            yield record_piece(record, self.field, split, "data.path", f"{self.path} {self.split}, row {index}")
        if self.validation_split is not None:
            for index, record in enumerate(self._load("data.validation_split", self.validation_split)):
                place = f"{self.path} {self.validation_split}, row {index}"
                yield record_piece(record, self.field, "validation", "data.path", place)

    def _load(self, where: str, split: str) -> Any:
        """The dataset's rows: memory-mapped by the library, whatever their number."""
        try:
            from datasets import load_dataset  # optional, see the module's docstring
        except ImportError as error:
            why = "the package `datasets` is not installed"
            raise UserError(Problem("data", f"hub, {self.path}", why, "pip install 'zerolaunch[data]'")) from error
        try:
            return load_dataset(self.path, self.name, split=split, data_files=self.data_files)
        except Exception as error:  # the library raises many kinds here, network errors included
            why = f"it cannot be loaded: {next(iter(str(error).splitlines()), type(error).__name__)}"
            got = f"{self.path}, {where}={split}"
            fix = "correct data.path, data.name, data.data_files or the split; a name on the hub needs network access"
            raise UserError(Problem("data.path", got, why, fix)) from error


def _local_files(data_files: DataFiles) -> list[Path]:
    """Those of `data_files` (paths or globs) that are files on this machine."""
    if data_files is None:
        return []
    if isinstance(data_files, Mapping):
        return [file for key in sorted(data_files) for file in _local_files(data_files[key])]
    patterns = [data_files] if isinstance(data_files, str) else data_files
    names = [name for pattern in patterns for name in sorted(glob.glob(pattern, recursive=True))]
    return [Path(name) for name in names if Path(name).is_file()]
