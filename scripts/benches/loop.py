"""tokens/s of launch.py over those of another program on the same plan: a bare DeepSpeed loop, or the Trainer.

`scripts/bench loop [peer=bare|trainer] [pairs=5] [steps=60] [skip=5] [overrides]`; the peers are `benches.bare_loop`
and `benches.trainer_loop`. Over the first it shows what logging, stopping and supervising cost a step.
Must never time an evaluation or a checkpoint: both come after the last step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benches.report import Row, ratios
from benches.request import BenchError, Request
from benches.sides import BARE, TRAINER, Sides
from benches.timing import in_turn

OPTIONS = {"pairs": 5, "steps": 60, "skip": 5}
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
        trained = in_turn(options["pairs"], {"ours": sides.ours, name: sides.peer})
        sides.check_same(trained["ours"], trained[name])
    rates = {side: [each.tokens_per_s for each in found] for side, found in trained.items()}
    parts = {f"{side}, tokens/s": values for side, values in rates.items()}
    values = ratios(rates["ours"], rates[name])
    return [Row(f"tokens/s over {other.name}", "ratio", values, at_least=at_least, parts=parts)]
