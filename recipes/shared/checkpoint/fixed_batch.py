"""How near two losses on a checkpoint's fixed batch must be to be of the same weights.

Used wherever a model that was saved is computed again: after a resume, and after an export.
Must never be asked about losses of different samples.
"""

from __future__ import annotations

SAMPLES = 4  # of the validation split, the first ones


def tolerance(before: str, after: str) -> float:
    """Relative: fp32 differs by the order of its sums, 16 bit by its rounding, two types by both of theirs."""
    if before == after == "fp32":
        return 1e-5
    return 2e-2 if before == after else 5e-2
