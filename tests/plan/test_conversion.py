"""What an elastic resume is told to take, by hand for small layouts.

Run by pytest, without torch.
Must never take a figure from the code it tests.
"""

from __future__ import annotations

from typing import Any

import pytest

from launcher.conversion import conversion, saved_layout, wanted_layout
from tests.plan.asking import planned


def checkpoint(**changes: Any) -> dict[str, Any]:
    """Of 2 ranks at stage 3 in fp32: 1,000 trained weights and 500 frozen ones; checked at 1,000 bytes a second."""
    manifest = {
        "world_size": 2,
        "zero_stage": 3,
        "precision": "fp32",
        "accumulation": "fp32",
        "offload_optimizer": None,
        "offload_param": None,
        "parameters": {"a": [10, 100], "b": [500]},
        "trained": [["a"]],
        "files": {"one.pt": {"bytes": 14_000}, "two.pt": {"bytes": 2_000}},
    }
    return {"manifest": manifest | changes, "checked_s": 16.0}


def test_the_same_layout_needs_nothing() -> None:
    assert conversion(planned("zero=stage3", "cluster.num_procs=2"), checkpoint()) is None


@pytest.mark.parametrize(
    ("request_", "read", "held"),
    [
        (("zero=stage3", "cluster.num_procs=1"), 12_000, 12_000),  # master and two moments, 4 bytes each
        (("zero=stage2", "cluster.num_procs=4"), 12_000, 12_000),  # four ranks of one host: a quarter each
        (("zero=stage0", "cluster.num_procs=2"), 12_000, 24_000),  # each rank has all
        (("zero=stage3", "cluster.num_procs=1", "ema.decay=0.9"), 16_000, 16_000),
    ],
    ids=str,
)
def test_what_is_read_and_held(request_: tuple[str, ...], read: int, held: int) -> None:
    found = conversion(planned(*request_), checkpoint())
    assert found is not None and (found.read_bytes, found.host_bytes) == (read, held)
    assert found.seconds == pytest.approx(read / 1000)


def test_it_says_both_layouts_and_that_nothing_is_written() -> None:
    plan, saved = planned("zero=stage2", "offload=cpu", "cluster.num_procs=1"), checkpoint()
    found = conversion(plan, saved)
    assert found is not None
    assert found.told(saved_layout(saved["manifest"]), wanted_layout(plan)) == (
        "saved as 2 ranks at stage 3 in fp32, loaded as 1 rank at stage 2 in fp32, optimizer on cpu: a host reads"
        " 0.000 GB and holds up to 0.000 GB of memory while it loads, about 12 s; no copy is written"
    )
