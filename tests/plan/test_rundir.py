"""Claims about the run folder: made exclusively, never over another run, its files replaced whole.

Run by pytest.
Must never write outside the test's own folder.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from launcher.errors import UserError
from launcher.rundir import RunDir, check_writable, load_run, read_json, write_json, write_text
from tests.plan.asking import refuses


def test_naming_a_run_creates_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert run.plan == tmp_path / "run" / "plan.json"
    assert not run.exists and list(tmp_path.iterdir()) == []


def test_paths_are_the_documented_ones(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.rank_log("alpha", 3) == tmp_path / "logs" / "alpha.rank3.log"
    assert run.checkpoint(500) == tmp_path / "checkpoints" / "step_00000500"
    files = (
        run.plan,
        run.config,
        run.overrides,
        run.ds_config,
        run.effective,
        run.provenance,
        run.metrics,
        run.summary,
    )
    assert [path.relative_to(tmp_path).as_posix() for path in (*files, run.latest, run.export)] == [
        *("plan.json", "config.yaml", "overrides.txt", "ds_config.json", "effective.json", "provenance.json"),
        *("metrics.jsonl", "summary.json", "checkpoints/latest", "export"),
    ]


def test_creating_makes_parents_and_claims_an_empty_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a" / "b")
    run.create()
    assert {path.name for path in run.path.iterdir()} == {"control", "logs", "checkpoints"}
    (tmp_path / "empty").mkdir()
    RunDir(tmp_path / "empty").create()


def test_a_folder_with_a_run_is_refused_and_told_how_to_go_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.plan.write_text("{}")
    with refuses("run.dir", "it already holds a run", f"recipe=resume run.dir={run.path}"):
        RunDir(run.path).create()
    assert run.plan.read_text() == "{}"


def test_a_folder_with_anything_else_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with refuses("run.dir", "it is not empty (thesis.tex)", "choose an empty or new folder"):
        RunDir(tmp_path).create()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_of_racing_launches_exactly_one_gets_the_folder(tmp_path: Path) -> None:
    """hydra-ecosystem/hydra#2925: jobs of one second shared a folder."""
    for attempt in range(50):
        barrier, results = threading.Barrier(4), []

        def claim(path: Path = tmp_path / str(attempt), barrier: threading.Barrier = barrier) -> str:
            barrier.wait()
            try:
                RunDir(path).create()
            except UserError as error:
                return error.problems[0].why
            return "created"

        threads = [threading.Thread(target=lambda: results.append(claim())) for _ in range(4)]  # noqa: B023
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4 and results.count("created") == 1, results
        assert all("just taken it" in why or "not empty" in why for why in results if why != "created"), results


def test_the_loser_of_a_race_between_look_and_claim_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, mkdir = RunDir(tmp_path / "run"), Path.mkdir

    def slow(path: Path, *args: object, **kwargs: object) -> None:
        if path == run.control and not path.exists():
            mkdir(path)  # another launch comes first
        mkdir(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", slow)
    with refuses("run.dir", "another launch has just taken it", "choose another run.dir"):
        run.create()


@pytest.mark.parametrize("inside", [".", "run", "a/run"])
def test_a_file_in_the_way_of_the_folder_is_refused(inside: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / inside
    with refuses("run.dir", str(path), "it cannot be created:", "choose a folder you may write to"):
        RunDir(path).create()
    with refuses("run.dir", str(path), "file is not a folder", "choose a folder you may write to"):
        check_writable(path)
    assert (tmp_path / "file").is_file()


def test_checking_a_folder_creates_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a root user, as in a container, may write anywhere
    with refuses("run.dir", f"{tmp_path} may not be written to", "choose a folder you may write to"):
        check_writable(tmp_path / "run")
    monkeypatch.setattr(Path, "mkdir", deny)
    with refuses("run.dir", "it cannot be created: Permission denied", "choose a folder you may write to"):
        RunDir(tmp_path / "run").create()


def test_loading_needs_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    for path, got in ((None, "nothing"), ("", "nothing"), (str(tmp_path), str(tmp_path))):
        with refuses("run.dir", got):
            load_run(path)
    (tmp_path / "plan.json").write_text("{}")
    assert load_run(str(tmp_path)).path == tmp_path


def test_resetting_clears_the_signals_of_the_last_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    for path in (run.stop_request, run.result, run.failure(2), run.pid(0)):
        path.write_text("{}")
    run.reset_control()
    assert list(run.control.iterdir()) == []


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_sees_the_old_or_the_new_file_whole(tmp_path: Path) -> None:
    path, stop = tmp_path / "file", threading.Event()
    texts = ["a" * 200_000, "b" * 100_000]
    write_text(path, texts[0])

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                write_text(path, text)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {path.read_text() for _ in range(300)}
    finally:
        stop.set()
        writer.join()
    assert seen <= set(texts)


def test_written_files_are_utf8_and_readable_by_others(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"name": "実験", "path": tmp_path})
    assert (tmp_path / "x.json").read_bytes() == f'{{\n  "name": "実験",\n  "path": "{tmp_path}"\n}}\n'.encode()
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == 0o644
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "y.json", float("nan"))


def test_reading_a_missing_half_written_or_damaged_file_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"step": 1')
    (tmp_path / "damaged.json").write_bytes(b'{"step\xa2: 1}')
    assert read_json(tmp_path / "none.json") is None
    assert read_json(tmp_path / "half.json") is None
    assert read_json(tmp_path / "damaged.json") is None
