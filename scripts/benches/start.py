"""Time to the first step of launch.py over that of a bare DeepSpeed script: what planning and checking cost a start.

`scripts/bench start [pairs=5] [warm_up=1] [overrides]`; the bare script is `benches.bare_loop`.
Must never count what happens once per machine: corpus and operators are made before, and `warm_up` pairs left out.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benches.report import Row, ratios
from benches.request import Request
from benches.sides import Sides
from benches.timing import in_turn

OPTIONS = {"pairs": 5, "warm_up": 1}
STEPS, SKIP = 2, 1  # the clock stops after the first step; the second is there to compare a loss after an update
AT_MOST = 1.15


def run(request: Request) -> list[Row]:
    """One row: the ratio of the two times, pair by pair."""
    warm_up = request.options["warm_up"]
    with tempfile.TemporaryDirectory(prefix="zerolaunch-bench-") as folder:
        sides = Sides(request.overrides, STEPS, SKIP, Path(folder))
        trained = in_turn(warm_up + request.options["pairs"], {"ours": sides.ours, "bare": sides.peer})
        sides.check_same(trained["ours"], trained["bare"])
    times = {name: [each.first_step_s for each in found[warm_up:]] for name, found in trained.items()}
    parts = {f"{name}, s": values for name, values in times.items()}
    return [
        Row(
            "time to first step over bare DeepSpeed",
            "ratio",
            ratios(times["ours"], times["bare"]),
            at_most=AT_MOST,
            parts=parts,
        )
    ]
