"""Fixtures of whole runs: starting one is nearly all of its work, so they share what they can."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.quick import programs_kept


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled programs are kept for the whole session."""
    with programs_kept(tmp_path_factory.getbasetemp() / ".cache" / "others"):
        yield


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of runs; all such folders of a session share one cache beside them."""
    return tmp_path_factory.mktemp("runs")
