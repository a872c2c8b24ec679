"""The learner's reader of manifests that name rows."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from learner_jax.manifests import RangeReader, manifest_digest
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.keys import SigningKey
from runspec.core.run_files import step_folder
from tests.verify.coordinator.deployment import RUN, Site
from tests.verify.coordinator.documents import ROWS, documents_spec
from verify.formats.ranges import RangeManifest, RowRange, sign_ranges

LOG = logging.getLogger("test")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, documents_spec())


def sign(site: Site, step: int, *, rows: int = ROWS, key: SigningKey | None = None) -> None:
    made = RangeManifest(RUN, step, RowRange.of_step(step, rows), 7, "ab" * 32)
    document = sign_ranges(made, key or site.coordinator)
    write_atomic(step_folder(site.run_dir, step) / "batch.json", document)


def reader_of(site: Site) -> RangeReader:
    return RangeReader(site.run_dir, documents_spec(), site.root.public_hex)


def test_it_waits_for_the_rows_of_a_step(site: Site) -> None:
    reader, stop = reader_of(site), threading.Event()
    signing = threading.Timer(0.05, sign, (site, 2))
    signing.start()
    found = reader.wait(2, stop, LOG)
    signing.join()
    assert found is not None and found.rows == RowRange(12, 18)
    assert manifest_digest(found) == manifest_digest(reader.manifest(2, signed=False))
    # given that it is told to stop, then it waits for nothing
    stop.set()
    assert reader.wait(3, stop, LOG) is None


def test_it_believes_the_coordinator_alone(site: Site) -> None:
    reader = reader_of(site)
    sign(site, 0, key=SigningKey.generate())
    with pytest.raises(UserError, match=r"step_0.*batch\.json"):
        reader.manifest(0)
    assert reader.manifest(0, signed=False).step == 0  # as after a rollback
    sign(site, 0, rows=ROWS + 1)
    with pytest.raises(UserError, match="rows 0 to 7 in step 0, which has 0 to 6"):
        reader.manifest(0)
    write_atomic(step_folder(site.run_dir, 0) / "batch.json", b"{}")
    with pytest.raises(UserError, match="ranges"):
        reader.manifest(0)
