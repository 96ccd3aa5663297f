"""Every way to break one file of a checkpoint is seen before training, named, and the checkpoint before it taken.

Run by pytest on copies of checkpoints of real runs; nothing is trained again.
Must never break a file that another test reads.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import UserError
from launcher.rundir import RunDir
from recipes.shared.checkpoint import find, manifest
from tests.train.running import Runs
from tests.train.test_parity import overrides

STAGES = ("stage1", "stage3")
NEWEST, BEFORE = "step_00000020", "step_00000019"
PLACES = 5  # of bits flipped in each file


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def breakages(path: Path, chance: random.Random) -> dict[str, Callable[[Path], None]]:
    """Ways to break a file of this size. tdrussell/diffusion-pipe#159: files of 0 bytes after power was lost."""
    size = path.stat().st_size
    bits = [0, 8 * size - 1, *(chance.randrange(8 * size) for _ in range(PLACES))]
    cuts = [0, size - 1, chance.randrange(1, size - 1)]
    return {
        **{f"bit {bit} flipped": lambda file, bit=bit: flip(file, bit) for bit in bits},
        **{f"cut to {cut} bytes": lambda file, cut=cut: file.write_bytes(file.read_bytes()[:cut]) for cut in cuts},
        "one byte more": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
        "removed": lambda file: file.unlink(),
    }


@pytest.fixture(params=STAGES)
def run(request: pytest.FixtureRequest, runs: Runs, tmp_path: Path) -> RunDir:
    """A copy of a finished run's two newest checkpoints."""
    source = RunDir(runs.get(*overrides("true", request.param, "none")))
    copy = RunDir(tmp_path / "run")
    for name in (NEWEST, BEFORE):
        shutil.copytree(source.checkpoints / name, copy.checkpoints / name)
    shutil.copy(source.latest, copy.latest)
    return copy


def test_a_broken_file_is_named_and_the_checkpoint_before_is_taken(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """deepspeedai/DeepSpeed#2319: a shard that is missing at a load."""
    chance = random.Random(20)
    assert find.newest(run).name == NEWEST and capsys.readouterr().err == ""
    files = sorted((run.checkpoints / NEWEST).iterdir())
    assert {"manifest.json", "rng_rank00000.pt", "rng_rank00001.pt"} < {path.name for path in files}
    for path in files:
        whole = path.read_bytes()
        for how, break_it in breakages(path, chance).items():
            break_it(path)
            assert find.newest(run).name == BEFORE, f"{path.name}: {how}"
            [line] = capsys.readouterr().err.splitlines()
            assert line.startswith(f"· passed over {NEWEST}: ") and path.name in line, f"{how}: {line}"
            path.write_bytes(whole)
    assert find.newest(run).name == NEWEST


def test_no_byte_of_a_manifest_can_change(run: RunDir) -> None:
    folder, chance = run.checkpoints / NEWEST, random.Random(21)
    path = folder / manifest.NAME
    whole = path.read_bytes()
    assert manifest.read(folder) is not None
    for place in range(len(whole)):
        flip(path, 8 * place + chance.randrange(8))
        assert manifest.read(folder) is None, f"byte {place} of {path.name}"
        path.write_bytes(whole)


@pytest.mark.parametrize("latest", [None, b"", b"step_99999999", b"../../etc", b"\xff\xfe\0", NEWEST.encode() + b"\n"])
def test_what_latest_says_does_not_matter(run: RunDir, latest: bytes | None) -> None:
    """The folders are looked at, not the pointer to one of them."""
    run.latest.unlink()
    if latest is not None:
        run.latest.write_bytes(latest)
    assert find.newest(run).name == NEWEST
    (run.checkpoints / NEWEST / "rng_rank00001.pt").unlink()
    assert find.newest(run).name == BEFORE


def test_a_save_that_did_not_end_is_no_checkpoint(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """vllm-project/speculators#739: a crash in the middle of a save left a folder that a resume took for whole."""
    for folder in (run.checkpoints / ".saving-00000021-0123abcd" / "step_00000021", run.checkpoints / "step_00000021"):
        shutil.copytree(run.checkpoints / NEWEST, folder)
    (run.checkpoints / "step_00000021" / manifest.NAME).unlink()
    assert find.newest(run).name == NEWEST
    assert "step_00000021: manifest.json is missing: the save did not end" in capsys.readouterr().err


def test_the_files_of_every_rank_lie_under_the_final_name(run: RunDir) -> None:
    """deepspeedai/DeepSpeed#5405: rank 0 renamed the folder while the others still wrote under the temporary name."""
    for name in (NEWEST, BEFORE):
        found = {path.name for path in (run.checkpoints / name).iterdir()}
        listed = manifest.read(run.checkpoints / name)["files"]
        assert found == {manifest.NAME, *listed}
        for rank in (0, 1):
            assert {f"rng_rank{rank:05d}.pt", f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"} <= listed.keys()


def test_files_that_another_host_kept_for_itself_are_all_named_with_their_ranks(run: RunDir) -> None:
    """deepspeedai/DeepSpeed#2319: disks that hosts do not share. A checkpoint of which a part is here is none."""
    missing = []
    for name in (NEWEST, BEFORE):
        missing = [
            path for path in (run.checkpoints / name).iterdir() if "rank_1" in path.name or "k00001" in path.name
        ]
        for path in missing:
            path.unlink()
    with pytest.raises(UserError) as caught:
        find.newest(run)
    [problem] = caught.value.problems
    for name in (NEWEST, BEFORE):
        assert f"{name}: {len(missing)} of " in problem.why
    assert problem.why.count("files missing, of rank 1: ") == 2
    assert all(path.name in problem.why for path in missing)
    assert "the files of all ranks" in problem.fix


def test_of_many_missing_files_and_ranks_five_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(8)]
    (tmp_path / names[0]).write_bytes(b"x")
    listed = {name: {"bytes": 1, "xxh3_128": ""} for name in names}
    manifest.write(tmp_path, {"format": manifest.FORMAT, "files": listed})
    ranks, shown = "1, 2, 3, 4, 5 and 2 more", ", ".join(names[1:6])
    assert manifest.problem_of(tmp_path) == f"7 of 8 files missing, of ranks {ranks}: {shown} and 2 more"
