"""Fixtures of the training tests: finished runs shared over the session."""

from __future__ import annotations

import pytest

from tests.train.running import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Real runs in fresh processes, kept for the session."""
    return Runs(tmp_path_factory.mktemp("runs"))
