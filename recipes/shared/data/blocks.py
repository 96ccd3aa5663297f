"""Makes blocks of bytes from one text file, cut where text may be cut, so that any size streams in little memory.

Called by the corpus kinds that read plain text.
Must never cut inside a UTF-8 character, and prefers to cut after a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 1 << 20


def read_blocks(path: Path, start: int, end: int, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Bytes start .. end - 1 of `path`, in order, in blocks of about block_bytes, none empty."""
    with path.open("rb") as file:
        file.seek(start)
        left, carry = end - start, b""
        while left > 0 and (chunk := file.read(min(block_bytes, left))):
            left -= len(chunk)
            data = carry + chunk
            cut = len(data) if left == 0 else (data.rfind(b"\n") + 1 or _character_start(data, len(data) - 1))
            if cut == 0:  # a single character so far
                carry = data
                continue
            yield data[:cut]
            carry = data[cut:]
        if carry:  # only when the file became shorter while it was read
            yield carry


def tail_start(path: Path, fraction: float) -> int:
    """Offset in bytes where about the last `fraction` of a file begins: after a line if one ends near there.

    The file must not be empty.
    """
    size = path.stat().st_size
    target = min(size - 1, int(size * (1 - fraction)))
    with path.open("rb") as file:
        file.seek(target)
        # Searching no further than half of the tail keeps the tail from being lost to one long last line.
        near = file.read(min(BLOCK_BYTES, (size - target) // 2))
        line_end = near.find(b"\n") + 1
        if line_end:
            return target + line_end
        file.seek(max(0, target - 3))
        around = file.read(4)
    return max(0, target - 3) + _character_start(around, min(3, target))


def _character_start(data: bytes, index: int) -> int:
    """Largest position <= index where a UTF-8 character begins; index itself if there is none within 3 bytes."""
    for position in range(index, max(-1, index - 4), -1):
        if data[position] & 0xC0 != 0x80:
            return position
    return index
