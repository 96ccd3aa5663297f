"""A disk that fills up within a save: the run ends with the reason, and the checkpoint before it loads.

Run by pytest; the disk is a tmpfs, so it needs root.
Must never leave it mounted.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.plan import Plan
from launcher.rundir import RunDir
from recipes.shared.checkpoint import find, manifest
from tests.plan.asking import planned
from tests.train.engines import Engines, request
from tests.train.running import SMALL, launch, losses, processes_of, start, wait_until

pytestmark = pytest.mark.train


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder of its own file system, small at first."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


PAGE = 4096  # a tmpfs counts in these


def resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def layout() -> Plan:
    """The plan of the runs below: three saves."""
    options = ["schedule=constant", "checkpoint.every=2", "checkpoint.keep=0", "run.steps=6", "zero=stage2"]
    return planned(*request(*options, "model.config.vocab_size=256", "eval.samples=2", "eval.every=0"))


@pytest.mark.parametrize("part", [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 0.995])
def test_a_disk_that_fills_up_at_any_byte_of_a_save_leaves_the_one_before(
    engines: Engines, disk: Path, tmp_path: Path, part: float
) -> None:
    """mlfoundations/open_lm#154. The room is gone after the check before the save: `part` of the third one fits."""
    plan = layout()
    engines.run_recipe(plan, tmp_path / "probe")
    saved = tmp_path / "probe" / "checkpoints" / "step_00000002"
    files = {path: -(-path.stat().st_size // PAGE) * PAGE for path in (tmp_path / "probe").rglob("*") if path.is_file()}
    size = sum(files[path] for path in saved.iterdir())
    resize(disk, int((part - 1) * size) + sum(files.values()))  # all that the probe has, less a part of its third save
    with pytest.raises(AssertionError, match=r"No space left on device \(.*: this save was undone"):
        engines.run_recipe(plan, disk / "run", unchecked_room=True)
    run = disk / "run"
    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text()
    assert newest.name == "step_00000004" and manifest.problem_of(newest) is None
    assert find.newest(RunDir(run)) == newest
    assert not list((run / "checkpoints").glob(".saving-*"))
    engines.run_recipe(dataclasses.replace(plan, resume_from=str(newest)), tmp_path / "again")
    assert losses(tmp_path / "again") == losses(tmp_path / "probe")[4:]


def test_a_save_that_would_not_fit_is_not_begun(disk: Path) -> None:
    """The disk is filled by somebody else while the run is on."""
    resize(disk, 64 * 2**20)
    run, options = disk / "run", ("schedule=constant", "checkpoint.every=5", "run.steps=2000", "zero=stage2")
    process = start(*SMALL, *options, f"run.dir={run}")
    wait_until(lambda: (run / "checkpoints" / "latest").exists() or process.poll() is not None)
    used = os.statvfs(disk)
    resize(disk, (used.f_blocks - used.f_bfree) * used.f_frsize + 300_000)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 5, out + err
    assert "nothing was written, the one before it is whole" in err
    assert not processes_of(run)
    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text()
    assert manifest.problem_of(newest) is None


def test_a_run_whose_checkpoints_cannot_fit_is_refused_before_it_starts(disk: Path) -> None:
    """All that retention keeps is counted, and a resumed run's own checkpoints are not counted twice."""
    resize(disk, 3_000_000)
    run, options = disk / "run", ("schedule=constant", "checkpoint.every=1", "run.steps=20")
    refused = launch(*SMALL, *options, "checkpoint.keep=0", f"run.dir={run}")
    assert refused.returncode == 4, refused.stdout + refused.stderr
    assert "the disk of run.dir" in refused.stderr and not run.exists()
