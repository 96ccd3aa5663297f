"""What DeepSpeed's own logger counts of a plan's collectives, in ranks that the engine server forks.

Called by the tests of predicted traffic.
Must never predict anything itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from launcher.plan import Plan
from recipes.shared import distributed
from recipes.shared.engine import build_engine
from recipes.shared.model import build_model


def counted(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes by phase and collective of one optimizer step. All ranks."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
    from benches.traffic_rank import count

    plan = Plan.from_json(case["plan"])
    ranks = distributed.initialise(plan)
    return dict(count(build_engine(plan, build_model(plan, ranks)), plan))
