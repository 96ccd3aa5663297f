"""A disk that fills up within a save: the run ends with the reason, and the checkpoint before it loads.

Run by pytest; the disk is a tmpfs, so it needs root.
Must never leave it mounted.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.shared.checkpoint import manifest
from tests.train.running import SMALL, launch, processes_of, steps

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


def resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


@pytest.mark.parametrize("saves", [2.3, 2.8])
def test_a_full_disk_ends_the_run_and_the_checkpoint_before_loads(disk: Path, saves: float) -> None:
    """mlfoundations/open_lm#154. Room for two saves and a part of the third: within a shard, or behind it."""
    run, options = disk / "run", ("schedule=constant", "checkpoint.every=2", "checkpoint.keep=0", "run.steps=12")
    resize(disk, 64 * 2**20)
    done = launch(*SMALL, *options[:2], "run.steps=2", "zero=stage2", f"run.dir={disk / 'probe'}")
    assert done.returncode == 0, done.stderr
    saved = disk / "probe" / "checkpoints" / "step_00000002"
    size = sum(path.stat().st_size for path in saved.iterdir())
    subprocess.run(["rm", "-r", str(disk / "probe")], check=True)
    resize(disk, int(saves * size) + 300_000)
    done = launch(*SMALL, *options, "zero=stage2", f"run.dir={run}")
    assert done.returncode == 5, done.stdout + done.stderr
    assert "No space left on device" in done.stderr, done.stderr
    assert not processes_of(run)
    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text()
    assert newest.name == "step_00000004" and manifest.problem_of(newest) is None
    resize(disk, 64 * 2**20)
    again = launch("recipe=resume", f"run.dir={run}")
    assert again.returncode == 0, again.stderr
    assert json.loads((run / "plan.json").read_text())["resume_from"].endswith("step_00000004")
    assert [record["step"] for record in steps(run)] == list(range(1, 13))
    assert not list((run / "checkpoints").glob(".saving-*"))
