"""Kills within saves and between them, written at once and in the background: the joined curve is the unbroken one.

Run by pytest; a part of `scripts/bench kill`, which does the same fifty times: the lives of a run are its own.
Must never count a kill as one within a save on anything but what the save left on the disk.
"""

from __future__ import annotations

import random

import pytest

from benches.kill import EVERY, Ordeal
from launcher.rundir import RunDir
from tests.train.running import SMALL, Runs
from tests.train.test_parity import overrides


@pytest.mark.parametrize(("zero", "background"), [("stage3", False), ("stage1", True)])
def test_killed_within_a_save_and_elsewhere_a_run_loses_no_more_than_it_may(
    runs: Runs, zero: str, background: bool
) -> None:
    """vllm-project/speculators#739: a crash in the middle of a save, and the resume that took what it left."""
    plain = overrides("true", zero, "none")
    own = (f"checkpoint.every={EVERY}", "checkpoint.keep=2", f"checkpoint.background={str(background).lower()}")
    ordeal = Ordeal([*SMALL, *plain, *own], RunDir(runs.get(*plain)), runs.new(), random.Random(zero))
    ordeal.suffer(2)
    assert len(ordeal.deaths) >= 2 and ordeal.within_saves
    assert [lives.difference() for lives in ordeal.lives] == [None] * len(ordeal.lives)
    assert [choice for lives in ordeal.lives for choice in lives.wrong_choices] == []
    # A save in the background is committed before the next one begins, so the newest may be that of two saves ago.
    assert max(death.lost for death in ordeal.deaths) <= (2 * EVERY if background else EVERY)
