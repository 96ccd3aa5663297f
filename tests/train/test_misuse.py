"""Saving and loading called as they must not be: an error says so, on time and by name; nothing hangs.

Run by pytest; misuse_ranks.py does the wrong thing.
Must never wait longer than the watchdog would.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.plan.asking import planned
from tests.train.engines import Engines, request

RANKS = "tests.train.misuse_ranks"
ONE_SAMPLE = "train.micro_batch_size=1"


@pytest.mark.parametrize("zero", ["stage0", "stage3"])
def test_a_save_on_one_rank_names_the_ranks_that_did_not_come(engines: Engines, tmp_path: Path, zero: str) -> None:
    """deepspeedai/DeepSpeed#801: rank 0 saves, the others train on, and everything hangs."""
    plan = planned(*request(f"zero={zero}", ONE_SAMPLE, "watch.stall_s=4"))
    answer = engines.call(f"{RANKS}:save_on_one_rank", 2, plan=plan.to_json(), run_dir=str(tmp_path))
    assert "save: ranks [1] did not come within 2 s, and it takes all of them" in answer["error"]
    assert answer["seconds"] < 20
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_not_loaded_over_an_engine_that_has_trained(engines: Engines, tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed#1457: at stage 3 a load after a save in one engine is not what it seems."""
    plan = dataclasses.replace(planned(*request("zero=stage3", ONE_SAMPLE)), resume_from=str(tmp_path))
    answer = engines.call(f"{RANKS}:load_over_training", 2, plan=plan.to_json(), run_dir=str(tmp_path))
    assert "this engine has trained 1 steps" in answer["error"]
