"""tokens/s of launch.py over those of another program on the same plan: a bare DeepSpeed loop, or the Trainer.

`scripts/bench loop [peer=bare|trainer] [pairs=5] [steps=60] [skip=5] [window=3] [overrides]`; the peers are
`benches.bare_loop` and `benches.trainer_loop`. Over the first it shows what logging, stopping and supervising cost a
step. The two of a pair run at once, each stopped for `window` seconds while the other goes on.
Must never time an evaluation or a checkpoint: both come after the last step.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benches.report import Row, ratios
from benches.request import BenchError, Request
from benches.sides import BARE, TRAINER, Sides, Trained

OPTIONS = {"pairs": 5, "steps": 60, "skip": 5, "window": 3}
PEERS = {"bare": (BARE, 0.98), "trainer": (TRAINER, 1.0)}  # and what the ratio is at least


def run(request: Request) -> list[Row]:
    """One row: the ratio of the two rates, pair by pair."""
    options = request.options
    named = [word.partition("=")[2] for word in request.overrides if word.startswith("peer=")]
    overrides = [word for word in request.overrides if not word.startswith("peer=")]
    name = (named or ["bare"])[-1]
    if name not in PEERS:
        raise BenchError(f"peer is one of {', '.join(PEERS)}, not {name}")
    other, at_least = PEERS[name]
    with tempfile.TemporaryDirectory(prefix="zerolaunch-bench-") as folder:
        sides = Sides(overrides, options["steps"], options["skip"], Path(folder), other)
        trained: dict[str, list[Trained]] = {"ours": [], "peer": []}
        for number in range(options["pairs"]):
            print(f"· pair {number + 1} of {options['pairs']}", file=sys.stderr, flush=True)
            for side, found in sides.both("peer" if number % 2 else "ours", options["window"]).items():
                trained[side].append(found)
        sides.check_same(trained["ours"], trained["peer"])
    rates = {side: [each.tokens_per_s for each in found] for side, found in trained.items()}
    parts = {"ours, tokens/s": rates["ours"], f"{name}, tokens/s": rates["peer"]}
    values = ratios(rates["ours"], rates["peer"])
    return [Row(f"tokens/s over {other.name}", "ratio", values, at_least=at_least, parts=parts)]
