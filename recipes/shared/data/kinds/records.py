"""Reads records, makes pieces of them (one document each), and decides which are held out for validation.

Called by the kinds that read records: jsonl, hub and chat.
Must never depend on how many records there are: they are streamed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.errors import Problem, UserError
from recipes.shared.data.writer import Piece, Split


def split_of(index: int, fraction: float) -> Split:
    """The split of record `index`: of the first n records ceil(n x fraction) are held out, evenly spread.

    Record 0 is held out, then (for 0.05) record 20, 40, ...
    """
    return "validation" if math.ceil((index + 1) * fraction) > math.ceil(index * fraction) else "train"


def record_piece(record: Any, field: str, split: Split, where: str, place: str) -> Piece:
    """The document in record[field]; `where` is the option and `place` the file and line (or row) named in errors.

    Raises: UserError when the field is missing, is not text, or holds half of a surrogate pair.
    """
    if field not in record:
        fields = ", ".join(sorted(map(str, record))) or "none"
        raise UserError(
            Problem("data.field", field, f"{place} has no such field", f"data.field= one of its fields: {fields}")
        )
    text = record[field]
    if not isinstance(text, str):
        got = f"{type(text).__name__} in field {field!r} at {place}"
        raise UserError(Problem("data.field", got, "the field must hold text", "name a text field, or mend the record"))
    try:
        return Piece(split, text.encode("utf-8"), last=True)
    except UnicodeEncodeError as error:
        got, why = f"field {field!r} at {place}", "the text holds half of a surrogate pair and has no UTF-8 form"
        raise UserError(Problem(where, got, why, "mend or remove the record")) from error


def json_records(path: Path, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(object, "file:line") of every line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:  # a JSON error or text that is not UTF-8
                raise UserError(_bad_line(where, place, line, f"the line is not valid JSON: {error}")) from error
            if not isinstance(record, dict):
                why = f"the line holds a JSON {type(record).__name__}, and an object is needed"
                raise UserError(_bad_line(where, place, line, why))
            yield record, place


def _bad_line(where: str, place: str, line: bytes, why: str) -> Problem:
    start = line[:60].decode("utf-8", "replace").rstrip()
    return Problem(where, f"{place}: {start}", why, 'one object per line, such as {"text": "..."}')
