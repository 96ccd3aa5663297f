"""Builds a plan's model in a rank and tells how much of it was whole at once.

Called in ranks that the engine server forks.
Must never build an engine.
"""

from __future__ import annotations

from typing import Any

from launcher.plan import Plan
from recipes.shared import construct, distributed, model


def build(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes that were whole `at_once`, those of the `whole` model, and elements `left` here, not in shards. All ranks.

    case["at_most"]: bytes of whole parameters after which construction cuts them again.
    """
    plan, made = Plan.from_json(case["plan"]), []

    class Watched(construct.ShardedConstruction):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    construct.RESIDENT_BYTES, model.ShardedConstruction = case["at_most"], Watched
    parameters: list[Any] = list(model.build_model(plan, distributed.initialise(plan)).parameters())
    whole = sum(parameter.ds_numel * parameter.element_size() for parameter in parameters)
    left = sum(parameter.numel() for parameter in parameters)
    return {"at_once": made[0].peak_resident_bytes, "whole": whole, "left": left}
