"""Which evaluation was the best so far, and how many came after it that were no better.

Kept in the training state, written into every manifest, and restored from it.
Must never be told a loss that ranks do not agree on.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass
class Best:
    """The best evaluation: its loss and step; `since`: evaluations after it."""

    eval_loss: float | None = None
    step: int | None = None
    since: int = 0

    def see(self, loss: float | None, step: int, min_delta: float) -> bool:
        """Whether this evaluation is better than the best one by more than `min_delta`; it is the best one then."""
        if loss is None or step == self.step:
            return False
        if self.eval_loss is None or loss < self.eval_loss - min_delta:
            self.eval_loss, self.step, self.since = loss, step, 0
            return True
        self.since += 1
        return False

    def recorded(self) -> dict[str, Any]:
        """For the manifest; `Best(**recorded)` makes it again."""
        return dataclasses.asdict(self)
