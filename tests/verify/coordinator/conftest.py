from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verify.coordinator.deployment import Site, tiny_spec
from verify.coordinator.handlers import public


@pytest.fixture(autouse=True)
def fresh_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status is computed for each request, however slow the machine."""
    monkeypatch.setattr(public, "LONG_S", float("inf"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A run whose origin serves version 0; nothing listens yet."""
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    with site.origin():
        yield site
