"""tokens/s of launch.py over those of a bare DeepSpeed loop: what logging, stopping and supervising cost a step.

`scripts/bench loop [pairs=5] [steps=60] [skip=5] [overrides]`; the bare loop is `benches.bare_loop`.
Must never time an evaluation or a checkpoint: both come after the last step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benches.report import Row, ratios
from benches.request import Request
from benches.sides import Sides
from benches.timing import in_turn

OPTIONS = {"pairs": 5, "steps": 60, "skip": 5}
AT_LEAST = 0.98


def run(request: Request) -> list[Row]:
    """One row: the ratio of the two rates, pair by pair."""
    options = request.options
    with tempfile.TemporaryDirectory(prefix="zerolaunch-bench-") as folder:
        sides = Sides(request.overrides, options["steps"], options["skip"], Path(folder))
        trained = in_turn(options["pairs"], {"ours": sides.ours, "bare": sides.bare})
        sides.check_same(trained["ours"], trained["bare"])
    rates = {name: [each.tokens_per_s for each in found] for name, found in trained.items()}
    parts = {f"{name}, tokens/s": values for name, values in rates.items()}
    return [
        Row(
            "tokens/s over bare DeepSpeed",
            "ratio",
            ratios(rates["ours"], rates["bare"]),
            at_least=AT_LEAST,
            parts=parts,
        )
    ]
