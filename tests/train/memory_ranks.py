"""Bytes that are really allocated while a plan's engine is built and trains, in ranks that the engine server forks.

Called by the tests of predicted memory.
Must never predict anything itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def peak(case: dict[str, Any]) -> dict[str, Any]:
    """{"peak": bytes of the rank that allocated most}. All ranks."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
    from benches.memory_rank import measure

    most = torch.tensor([max(measure({"plan": case["plan"], "steps": 2})["peaks"].values())])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {"peak": int(most)}
