"""A coordinator that serves, for tests of workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sampler.worker.works import Works, site_of
from tests.verify.coordinator.deployment import tiny_spec


@pytest.fixture
def works(tmp_path: Path) -> Iterator[Works]:
    with site_of(tmp_path, tiny_spec()) as works, works.site.serving():
        yield works
        for member in works.members:
            member.leave()
