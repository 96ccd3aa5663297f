"""Fixtures of the training tests: finished runs shared over the session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.train.engines import Engines
from tests.train.running import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Real runs in fresh processes, kept for the session and shared by the processes of `pytest -n`."""
    base = tmp_path_factory.getbasetemp()
    return Runs((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "runs")


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A server that imported torch and DeepSpeed once and forks the ranks of each case."""
    server = Engines(tmp_path_factory.mktemp("engines") / "server.log")
    yield server
    server.close()
