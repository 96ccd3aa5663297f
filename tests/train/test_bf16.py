"""In bf16, stages 1, 2 and 3 are one computation, bit for bit, where DeepSpeed rounds at the same places.

Run by pytest on the engine server; the losses in fp32 against plain PyTorch are in test_parity.py.
Must never compare with a tolerance.
"""

from __future__ import annotations

import pytest

from tests.plan.asking import planned
from tests.train.engines import Engines, request

pytestmark = pytest.mark.train
STEPS = 20


def curve(engines: Engines, zero: str, accumulation: int) -> list[float]:
    """Losses of 20 steps. Clipping off: DeepSpeed keeps the norm in fp32 at stages 1 and 2 and in fp64 at stage 3."""
    plan = planned(
        *request(
            f"zero={zero}",
            "precision=bf16",
            "deepspeed.gradient_clipping=0.0",
            f"train.gradient_accumulation_steps={accumulation}",
        )
    )
    if (lacking := engines.lacks(plan)) is not None:
        pytest.skip(lacking)
    answer = engines.run(plan, STEPS)
    assert "error" not in answer, answer
    assert answer["effective"]["parameter_dtypes"] == ["bfloat16"]
    losses: list[float] = answer["losses"]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.3
    return losses


def test_stages_1_2_and_3_are_bit_equal(engines: Engines) -> None:
    assert curve(engines, "stage1", 1) == curve(engines, "stage2", 1) == curve(engines, "stage3", 1)


def test_stages_2_and_3_are_bit_equal_with_accumulation(engines: Engines) -> None:
    """Stage 1 is not: it adds up a rank's own micro-batches in bf16 before it reduces, the others reduce each first."""
    assert curve(engines, "stage2", 2) == curve(engines, "stage3", 2)
