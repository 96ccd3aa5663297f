"""The export job by itself: taken up again, checked, refused; nothing half lies under the target's name.

Run by pytest in this process, on the checkpoint of a real run.
Must never change the checkpoint of a shared run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launcher.errors import UserError
from recipes import export
from recipes.shared import safetensors_writer
from recipes.shared.checkpoint import manifest
from recipes.shared.checkpoint.reader import open_checkpoint
from tests.train.running import ROOT, Runs, launch
from tests.train.test_parity import overrides


def plan_json(run: Path) -> dict[str, Any]:
    """The run's plan, as a job gets it."""
    found: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return found


def request(run: Path, target: Path, **changes: Any) -> dict[str, Any]:
    """What the launcher asks for: every tensor of the newest checkpoint in files of up to 60 kB."""
    asked = {
        "run_dir": str(run),
        "plan": plan_json(run),
        "step": None,
        "best": False,
        "weights": "trained",
        "source": None,
        "model_config": None,
        "lora": "merged",
    }
    return asked | {"dtype": "fp32", "dir": str(target), "max_shard_bytes": 60_000, "verify": True} | changes


@pytest.fixture
def run(runs: Runs) -> Path:
    """A finished run."""
    return runs.get(*overrides("true", "stage2", "none"))


def test_an_export_that_was_cut_off_goes_on_at_the_next_file(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, written = tmp_path / "export", []

    def until_the_third(shard: Any, *rest: Any) -> dict[str, str]:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(shard.file)
        return safetensors_writer.write_shard(shard, *rest)

    monkeypatch.setattr(export, "write_shard", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        export.run_job(request(run, target))
    (staging,) = tmp_path.iterdir()
    kept = {name: (staging / name).stat().st_mtime_ns for name in written}
    (staging / "model-00004.part").write_text("half")
    written.clear()
    monkeypatch.setattr(export, "write_shard", safetensors_writer.write_shard)
    answer = export.run_job(request(run, target))
    assert Path(answer["staging"]) == staging
    assert {name: (staging / name).stat().st_mtime_ns for name in kept} == kept
    assert not list(staging.glob("*.part")) and not (staging / "progress.json").exists()
    index = json.loads((staging / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: tensor for file in set(index.values()) for name, tensor in load_file(staging / file).items()}
    for entry in open_checkpoint(run / "checkpoints" / "step_00000020"):
        assert torch.equal(found[entry.name], entry.read()), entry.name


def test_what_was_cut_off_is_not_continued_as_something_else(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(export, "_write_model_files", interrupted)
        export.run_job(request(run, tmp_path / "export"))
    answer = export.run_job(request(run, tmp_path / "export", dtype="bf16", max_shard_bytes=10**9))
    names = sorted(path.name for path in Path(answer["staging"]).iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    assert {tensor.dtype for tensor in load_file(Path(answer["staging"]) / "model.safetensors").values()} == {
        torch.bfloat16
    }


def interrupted(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_a_file_that_is_not_what_was_read_is_found_and_removed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_failing_disk(shard: Any, folder: Path, *rest: Any) -> dict[str, str]:
        digests = safetensors_writer.write_shard(shard, folder, *rest)
        content = bytearray((folder / shard.file).read_bytes())
        content[-1] ^= 1
        (folder / shard.file).write_bytes(content)
        return digests

    monkeypatch.setattr(export, "write_shard", on_a_failing_disk)
    with pytest.raises(UserError, match="is not what was read from the checkpoint"):
        export.run_job(request(run, tmp_path / "export"))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_while_a_file_is_copied_is_told_of(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of it once, and does so between two parts of a tensor: the sync at the end would succeed."""
    failed = threading.Event()

    def once(handle: int) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, "Input/output error")

    def awaited(part: Any, dtype: Any) -> Any:
        assert failed.wait(10)
        return cast(part, dtype)

    cast = safetensors_writer.cast
    monkeypatch.setattr(safetensors_writer.os, "fdatasync", once)
    monkeypatch.setattr(safetensors_writer, "cast", awaited)
    with pytest.raises(OSError, match="Input/output error"):
        export.run_job(request(run, tmp_path / "export", max_shard_bytes=10**9))
    assert failed.is_set() and not (tmp_path / "export").exists()
    assert not list(tmp_path.glob(".export.exporting/*.safetensors"))


def test_one_file_that_is_wrong_stops_the_others_before_the_folder_goes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are written beside each other: none may be written on into a folder that is being removed."""

    def write(shard: Any, *rest: Any) -> dict[str, str]:
        digests = safetensors_writer.write_shard(shard, *rest)
        return dict.fromkeys(digests, "0") if "00001-of" in shard.file else digests

    monkeypatch.setattr(export, "write_shard", write)
    with pytest.raises(UserError, match="model-00001-of"):
        export.run_job(request(run, tmp_path / "export"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"F32"', b'"I32"'), (b'"shape":[', b'"shape":[1,'), (b"norm", b"nrom")],
    ids=["element", "shape", "name"],
)
def test_a_header_that_is_not_what_was_asked_for_is_found(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bytes, new: bytes
) -> None:
    """The bytes of every tensor are right; what the library reads from the header is not."""

    def write(shard: Any, folder: Path, *rest: Any) -> dict[str, str]:
        digests = safetensors_writer.write_shard(shard, folder, *rest)
        content = (folder / shard.file).read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + size].replace(old, new, 1).rstrip()
        header += b" " * (-len(header) % 8)
        (folder / shard.file).write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
        return digests

    monkeypatch.setattr(export, "write_shard", write)
    with pytest.raises(UserError, match="is not what was read from the checkpoint"):
        export.run_job(request(run, tmp_path / "export", max_shard_bytes=10**9))


ALONE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from recipes import export
export.run_job(json.load(sys.stdin))
print([name for name in ("torch", "transformers", "deepspeed", "peft") if name in sys.modules])
"""


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_an_export_loads_no_torch(run: Path, tmp_path: Path, dtype: str) -> None:
    """Importing it takes longer than copying a billion bytes."""
    asked = json.dumps(request(run, tmp_path / "export", dtype=dtype))
    script = [sys.executable, "-c", ALONE, str(ROOT)]
    done = subprocess.run(script, input=asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_two_exports_to_one_folder_are_one_too_many(run: Path, tmp_path: Path) -> None:
    staging = tmp_path / ".export.exporting"
    staging.mkdir()
    with (staging / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another export is writing it at this moment"):
            export.run_job(request(run, tmp_path / "export"))


def test_fp16_refuses_what_it_cannot_hold(run: Path, tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed#3841 and its like report success over a file of infinities."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    folder = copy / "checkpoints" / "step_00000020"
    shard = next(folder.glob("*pp_rank_0_*optim_states.pt"))
    content = torch.load(shard, weights_only=False)
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[5] = 7e4
    torch.save(content, shard)
    target, source = tmp_path / "export", str(folder)
    with pytest.raises(UserError, match=r"values beyond fp16's range"):
        export.run_job(request(copy, target, source=source, dtype="fp16"))
    assert not target.exists()
    export.run_job(request(copy, target, source=source, dtype="bf16"))


def test_a_checkpoint_that_is_named_must_be_whole(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    next((copy / "checkpoints" / "step_00000020").glob("*optim_states.pt")).unlink()
    done = launch("recipe=export", f"run.dir={copy}", "export.step=20")
    assert done.returncode == 2 and "files missing, of rank" in done.stderr
    done = launch("recipe=export", f"run.dir={copy}", "export.step=77")
    assert done.returncode == 2 and "there is no such checkpoint" in done.stderr
    assert not (copy / "export").exists()


@pytest.mark.parametrize("kind", ["*model_states.pt", "*optim_states.pt"])
def test_a_file_that_changed_is_found_while_it_is_copied(
    run: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it can be read at all or not, nothing of it stays: the checkpoint before it is exported."""
    copy, target = tmp_path / "run", tmp_path / "export"
    shutil.copytree(run, copy)
    file = next((copy / "checkpoints" / "step_00000020").glob(kind))
    whole = file.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):  # the zip's first header, a tensor, its end
        changed = bytearray(whole)
        changed[place] ^= 1
        file.write_bytes(changed)
        answer = export.run_job(request(copy, target))
        assert Path(answer["provenance"]["checkpoint"]).name == "step_00000019", place
        assert f"passed over step_00000020: {file.name} differs" in capsys.readouterr().err
        shutil.rmtree(answer["staging"])
        with pytest.raises(UserError, match="checksum"):
            export.run_job(request(copy, target, step=20))
        assert not target.exists() and not Path(answer["staging"]).exists()


def test_a_model_that_reloads_with_another_loss_is_not_exported(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    folder = copy / "checkpoints" / "step_00000020"
    saved = manifest.read(folder)
    assert saved is not None
    manifest.write(folder, saved | {"fixed_batch_loss": saved["fixed_batch_loss"] * 1.001})
    done = launch("recipe=export", f"run.dir={copy}")
    assert done.returncode == 5
    assert "reloaded, the model's loss on the fixed batch is" in done.stderr
    assert not [path.name for path in copy.iterdir() if "export" in path.name]
    assert launch("recipe=export", f"run.dir={copy}", "export.verify=false").returncode == 0


def test_a_disk_without_room_is_refused_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        with pytest.raises(UserError, match="GB are to be written"):
            export.run_job(request(run, small / "export"))
        assert not (small / "export").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)
