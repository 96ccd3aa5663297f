"""The .pt file that torch.save writes, an uncompressed zip: its pickle, and its storages as views of the mapped file.

Used by `unpickle`.
Must never hand out bytes beyond the record that was asked for, or read a storage before it is used.
"""

from __future__ import annotations

import mmap
import zipfile
from pathlib import Path

import numpy as np

from recipes.shared.elements import Array

_LOCAL_HEADER_BYTES = 30  # then a name and an extra field, whose lengths are its last two numbers
_PICKLE, _ORDER = "/data.pkl", "byteorder"


class BadContainer(ValueError):
    """The file is not what torch.save writes."""


class Container:
    """One open file. It stays mapped for as long as a view of it lives."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with zipfile.ZipFile(file) as archive:
                self.records = {record.filename: record for record in archive.infolist()}
                names = [name for name in self.records if name.endswith(_PICKLE)]
                if len(names) != 1:
                    raise BadContainer(f"{len(names)} records are called data.pkl")
                self.folder = names[0].removesuffix(_PICKLE)
                self.pickle = archive.read(names[0])
                if self._has(_ORDER) and archive.read(f"{self.folder}/{_ORDER}") != b"little":
                    raise BadContainer("it was written on a machine of another byte order")

    def storage(self, key: str, size_bytes: int) -> Array:
        """The first `size_bytes` of record data/`key`, as bytes."""
        record = self.records[f"{self.folder}/data/{key}"]
        header = self.mapped[record.header_offset : record.header_offset + _LOCAL_HEADER_BYTES]
        lengths = (int.from_bytes(header[place : place + 2], "little") for place in (26, 28))
        start = record.header_offset + _LOCAL_HEADER_BYTES + sum(lengths)
        if record.compress_type != zipfile.ZIP_STORED or record.file_size < size_bytes:
            raise BadContainer(f"record {record.filename} has {record.file_size} bytes, not {size_bytes}")
        if len(header) < _LOCAL_HEADER_BYTES or start + size_bytes > len(self.mapped):
            raise BadContainer(f"the file ends within record {record.filename}")
        return np.frombuffer(self.mapped, np.uint8, size_bytes, start) if size_bytes else np.empty(0, np.uint8)

    def _has(self, name: str) -> bool:
        return f"{self.folder}/{name}" in self.records
