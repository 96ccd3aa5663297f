"""Training time that a background save blocks, over that of a save at once, of one state in the same processes.

`scripts/bench save [pairs=5] [millions=130] [stage=3] [overrides]`, on 2 ranks; within them works `benches.save_rank`.
Must never call a save done before it is committed, nor keep quiet about what steps beside the writing lose.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benches.group import ask_ranks, resumed, saved_run
from benches.report import GIB, Row, ratios
from benches.request import Request

OPTIONS = {"pairs": 5, "millions": 130, "stage": 3}
AT_MOST = 0.20


def run(request: Request) -> list[Row]:
    """Blocked time, the same with all that is lost, and growth of memory."""
    options = request.options
    with tempfile.TemporaryDirectory(prefix="zerolaunch-bench-") as folder:
        place = Path(folder)
        saved = saved_run(place, options["millions"], options["stage"], request.overrides)
        plan = resumed(saved, "checkpoint.async=true")
        answers = ask_ranks(plan, "benches.save_rank", {"pairs": options["pairs"]}, place)
    return rows_of(answers)


def rows_of(answers: list[dict[str, Any]]) -> list[Row]:
    """The rows, from each rank's figures pair by pair; of the ranks the slowest, or largest, counts."""
    background, at_once = (worst(answers, kind) for kind in ("background", "at once"))
    blocked = {"background, s": background["blocked_s"], "at once, s": at_once["blocked_s"]}
    blocked["background, until committed, s"] = background["committed_s"]
    losses = {"background, s": background["fixed_loss_s"], "at once, s": at_once["fixed_loss_s"]}
    whole, below = (added(kind["blocked_s"], kind["fixed_loss_s"]) for kind in (background, at_once))
    steps = list(zip(answers[0]["steps_beside_s"], answers[0]["steps_alone_s"], strict=True))  # ranks step together
    lost = [sum(beside) - sum(alone) for beside, alone in steps]
    stepping = {
        "steps beside the writing": [float(len(beside)) for beside, _ in steps],
        "step beside the writing, s": [statistics.mean(beside) for beside, _ in steps],
        "step alone, s": [statistics.mean(alone) for _, alone in steps],
        "lost by all of them, s": lost,
    }
    memory, memory_at_once = ([size / GIB for size in kind["memory_bytes"]] for kind in (background, at_once))
    name = "blocked by a background save over a save at once"
    return [
        Row(name, "ratio", ratios(blocked["background, s"], blocked["at once, s"]), at_most=AT_MOST, parts=blocked),
        Row(f"{name}, with the loss on fixed samples", "ratio", ratios(whole, below), parts=losses),
        Row("step beside the writing over a step alone", "ratio", [sum(b) / sum(a) for b, a in steps], parts=stepping),
        Row(
            f"{name}, with what those steps lose",
            "ratio",
            ratios(added(blocked["background, s"], lost), blocked["at once, s"]),
        ),
        Row("growth of a rank's memory in a background save", "GiB", memory, parts={"at once, GiB": memory_at_once}),
    ]


def worst(answers: list[dict[str, Any]], kind: str) -> dict[str, list[float]]:
    """What `Saves.save` measured of one kind of save, pair by pair, the greatest of all ranks."""
    names = [name for name in answers[0] if name.startswith(f"{kind}, ")]
    columns = {name: zip(*(answer[name] for answer in answers), strict=True) for name in names}
    return {name.removeprefix(f"{kind}, "): [max(values) for values in column] for name, column in columns.items()}


def added(first: list[float], second: list[float]) -> list[float]:
    """first + second, pair by pair."""
    return [one + other for one, other in zip(first, second, strict=True)]
