"""A process in which the package of this folder is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runspec.core.models import family
from tests.family_package.installed import family_paths


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of installed packages; more may be added with `installed.add_package`."""
    folder = tmp_path / "site"
    for path in family_paths(folder):
        monkeypatch.syspath_prepend(path)
    family._offered.cache_clear()
    yield folder
    family._offered.cache_clear()
