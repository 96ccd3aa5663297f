"""A kill at any moment of a commit leaves the checkpoint before it or the new one, whole, and `latest` at one of them.

Run by pytest: the commit dies at each of its changes of a file in turn; the folders hold a few bytes.
Must never take the word of the commit for what is whole.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.rundir import RunDir
from recipes.shared.checkpoint import find, manifest, save
from tests.dying import deaths


def filled(folder: Path, content: bytes) -> dict[str, Any]:
    """A folder with two shards; returns the files as a manifest lists them."""
    folder.mkdir(parents=True)
    for name in ("zero_pp_rank_0.pt", "zero_pp_rank_1.pt"):
        (folder / name).write_bytes(content)
    return {path.name: manifest.digest(path) for path in folder.iterdir()}


@pytest.mark.parametrize("abandoned", [False, True], ids=["", "over one that was abandoned"])
def test_killed_at_any_change_of_a_file_a_commit_leaves_the_old_or_the_new_one(tmp_path: Path, abandoned: bool) -> None:
    """deepspeedai/DeepSpeed#5405, vllm-project/speculators#739: what a reader found in the middle of a save."""
    run = RunDir(tmp_path / "run")
    kept = SimpleNamespace(checkpoint=SimpleNamespace(keep=1, keep_every=0, best=False))
    state: Any = SimpleNamespace(run=run, plan=SimpleNamespace(resume_from=None, config=kept))
    staging, old, new = run.checkpoints / ".saving-00000003-0123abcd", run.checkpoint(2), run.checkpoint(3)
    described: dict[str, Any] = {"format": manifest.FORMAT}

    def fresh() -> None:
        shutil.rmtree(run.path, ignore_errors=True)
        for folder in (run.checkpoint(1), old):
            manifest.write(folder, described | {"files": filled(folder, b"old")})
        run.latest.write_text(old.name)
        if abandoned:
            filled(new, b"half")
        described["files"] = filled(staging / new.name, b"new")
        (staging / "zero_to_fp32.py").write_text("pass")

    def commit() -> None:
        manifest.write(staging / new.name, described)
        save._commit(run, staging, new)
        save._retain(state, new)

    found = []
    for _ in deaths(fresh, commit):
        found.append(find.newest(run))
        assert {path.read_bytes() for path in found[-1].glob("*.pt")} == {b"new" if found[-1] == new else b"old"}
        assert manifest.problem_of(run.checkpoints / run.latest.read_text()) is None
    assert found == sorted(found) and set(found) == {old, new}, "once it is committed it stays"
    assert manifest.steps(run.checkpoints) == [new] and not staging.exists()
