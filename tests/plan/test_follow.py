"""What counts as news in the folder of a running job: everything that is added or replaced, and silence for a while.

Run by pytest, without processes.
Must never wait for a clock: how long silence may last is set to nothing, or to for ever.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher import follow
from launcher.follow import Changes, Tail
from launcher.rundir import overwrite, write_json


@pytest.fixture(autouse=True)
def _for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LOOK_S", float("inf"))


def test_a_file_that_grows_is_news_once(tmp_path: Path) -> None:
    changes = Changes(tmp_path / "metrics.jsonl")
    assert changes.any() and not changes.any(), "the first time things are looked at, though there is nothing"
    changes.path.write_text("{}\n")
    assert changes.any() and not changes.any()
    with changes.path.open("a") as file:
        file.write("{}\n")
    assert changes.any() and not changes.any()


def test_marks_that_come_go_and_are_replaced_are_news(tmp_path: Path) -> None:
    write_json(tmp_path / "status.json", {"text": "training"})
    (tmp_path / "heartbeat").write_text("1")
    changes = Changes(tmp_path)
    assert changes.any() and not changes.any()
    overwrite(tmp_path / "heartbeat", "2")
    assert not changes.any(), "a beat is no news"
    for act in (
        lambda: write_json(tmp_path / "status.json", {"text": "evaluating"}),
        lambda: (tmp_path / "done.rank0").touch(),
        lambda: (tmp_path / "done.rank0").unlink(),
    ):
        os.utime(tmp_path, ns=(0, 0))  # the clock of a file system ticks coarsely
        assert changes.any() and not changes.any()
        act()
        assert changes.any() and not changes.any()


def test_silence_is_news_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = Changes(tmp_path)
    assert changes.any() and not changes.any()
    monkeypatch.setattr(follow, "LOOK_S", 0.0)
    assert changes.any() and changes.any()


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    assert tail.read() == []
    tail.path.write_text('{"step": 1}\n{"st')
    assert tail.read() == [{"step": 1}] and tail.read() == []
    with tail.path.open("a") as file:
        file.write('ep": 2}\n')
    assert tail.read() == [{"step": 2}]
