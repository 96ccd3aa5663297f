"""Step time under audit=warn, once the audit has taken itself away, over that of audit=off, at stage 3.

`scripts/bench audit [pairs=5] [steps=40] [skip=5] [overrides]`; the first `skip` steps do not count.
Must never time a step that is watched: what those cost is no cost of a run.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benches.report import Row, ratios
from benches.request import BenchError, Request, with_defaults
from benches.sides import Sides
from benches.timing import in_turn

OPTIONS = {"pairs": 5, "steps": 40, "skip": 5}
AT_MOST = 1.02
MODES = ("warn", "off")


def run(request: Request) -> list[Row]:
    """One row: the ratio of the two step times, pair by pair."""
    options, words = request.options, with_defaults(["zero=stage3"], request.overrides)
    with tempfile.TemporaryDirectory(prefix="zerolaunch-bench-") as folder:
        sides = {}
        for mode in MODES:
            place = Path(folder, mode)
            place.mkdir()
            sides[mode] = Sides([*words, f"audit={mode}"], options["steps"], options["skip"], place)
        watched = sides["warn"].plan.config.audit.steps
        if watched >= options["skip"]:
            raise BenchError(f"{watched} steps are watched: skip={watched + 2} leaves them out")
        trained = in_turn(options["pairs"], {mode: side.ours for mode, side in sides.items()})
        sides["off"].check_losses(trained["warn"], trained["off"])
    per_token = {mode: [1 / each.tokens_per_s for each in found] for mode, found in trained.items()}
    parts = {f"audit={mode}, tokens/s": [each.tokens_per_s for each in found] for mode, found in trained.items()}
    values = ratios(per_token["warn"], per_token["off"])
    return [Row("step time with audit=warn over audit=off", "ratio", values, at_most=AT_MOST, parts=parts)]
