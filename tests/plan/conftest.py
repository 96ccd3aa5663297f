"""Fixtures of the planning tests: the command line in this process, and a hostfile of two hosts.

Used by name; nothing here applies by itself.
Must never let a test reach the user's run folders: the working folder is the test's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.cli import main


@dataclass(frozen=True)
class Answer:
    """What one command line came to."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Answer]:
    """cli("mode=plan", ...) -> Answer, as `python launch.py mode=plan ...` on CPU in an empty folder."""
    monkeypatch.setattr(sys, "argv", sys.argv)  # main() replaces it; this brings it back
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.delenv("HYDRA_FULL_ERROR")  # main() sets it; this takes it away before and after
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def call(*arguments: str) -> Answer:
        capsys.readouterr()
        code = main(list(arguments))
        streams = capsys.readouterr()
        return Answer(code, streams.out, streams.err)

    return call


@pytest.fixture(scope="session")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides for two hosts of four GPUs each, alpha and beta."""
    return _hosts(tmp_path_factory, "alpha slots=4\nbeta slots=4\n")


@pytest.fixture(scope="session")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides for one host of four GPUs, alpha."""
    return _hosts(tmp_path_factory, "alpha slots=4\n")


def _hosts(factory: pytest.TempPathFactory, text: str) -> tuple[str, ...]:
    path = factory.mktemp("hosts") / "hosts"
    path.write_text(text)
    return ("cluster=hostfile", f"cluster.hostfile={path}", "cluster.accelerator=cuda")
