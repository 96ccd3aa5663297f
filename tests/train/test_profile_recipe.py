"""recipe=profile, really run: what it leaves, and that the next plan on this machine uses it.

Run by pytest: one launch, and two plans, in a cache of the test's own.
Must never compare a speed with a figure: machines differ.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.env import extensions_dir
from tests.train.running import SMALL, launch, steps

REQUEST = (*SMALL, "zero=stage2", "precision=bf16", "data.max_bytes=300000")
MEASURED = ("bf16_flops_per_s", "fp32_flops_per_s", "memory_bytes_per_s", "node_bytes_per_s", "pcie_bytes_per_s")


def with_cache(folder: Path) -> dict[str, str]:
    """This environment with a cache of its own, but for DeepSpeed's operators: to compile them takes minutes."""
    return os.environ | {"XDG_CACHE_HOME": str(folder), "TORCH_EXTENSIONS_DIR": str(extensions_dir())}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return with_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cache: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("profile") / "run"
    done = launch("recipe=profile", *REQUEST, f"run.dir={folder}", env=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def plan(cache: dict[str, str], *overrides: str) -> dict[str, Any]:
    done = launch("mode=plan", "plan.format=json", *REQUEST, *overrides, env=cache)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_it_takes_five_steps_measures_and_leaves_no_checkpoint(run: Path) -> None:
    hardware = json.loads((run / "hardware.json").read_text())
    assert len(steps(run)) == 5
    assert all(hardware[name] > 0 for name in MEASURED)
    assert 0 < hardware["utilisation"] <= 1
    assert hardware["ranks_per_host"] == 2 and hardware["host_bytes"] > 10**8
    assert list((run / "checkpoints").iterdir()) == []


def test_the_summary_has_planned_and_measured_terms(run: Path) -> None:
    memory = json.loads((run / "summary.json").read_text())["memory"]
    assert {"weights", "master", "moments"} <= memory["terms"].keys() and memory["surprises"] == []
    for term in ("weights", "master", "moments"):  # no profile of this model is there: buffers are not planned
        assert memory["terms"][term]["measured"] == pytest.approx(memory["terms"][term]["planned"], rel=1e-3), term


def test_the_next_plan_here_estimates_the_step_that_was_measured(run: Path, cache: dict[str, str]) -> None:
    hardware = json.loads((run / "hardware.json").read_text())
    later = plan(cache)
    assert "measured by recipe=profile on " in later["config"]["hardware"]["name"]
    assert later["estimate"]["time"]["step_s"] == pytest.approx(hardware["step_s"], rel=1e-6)
    assert later["sources"]["hardware.utilisation"].startswith("solved: ")


def test_another_plan_may_name_the_file(run: Path, tmp_path: Path) -> None:
    named = plan(with_cache(tmp_path), f"hardware.file={run}/hardware.json")
    assert named["estimate"]["time"]["step_s"] > 0
