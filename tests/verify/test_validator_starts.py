"""Validators that would judge by other data or profiles than the run's end at their start."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from runspec.core.process import RunStopped
from tests.verify.calibration.profiles import ROOT, document, made_profile
from tests.verify.calibration.test_profile import with_profile
from tests.verify.coordinator.deployment import RUN, Site, tiny_spec
from verify import validator


@pytest.fixture(autouse=True)
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graders need nothing here."""
    monkeypatch.setattr(validator, "require_graders", lambda spec: None)


def start(site: Site, folder: Path) -> None:
    key = folder / "validator.key"
    site.validator.save(key)
    validator.run(
        run=RUN,
        coordinator=site.url,
        weights=[site.weights],
        public_key=site.root.public_hex,
        key_file=key,
        directory=folder / "validator",
        stop=threading.Event(),
        log=logging.getLogger("test"),
    )


def test_one_with_other_data_says_so_before_it_claims_anything(tmp_path: Path) -> None:
    # given a coordinator that has looked at its rows
    rows = tmp_path / "rows.parquet"
    rows.write_bytes(b"its rows")
    spec = tiny_spec()
    source = spec.data.sources[0].model_copy(update={"uri": str(rows)})
    data = spec.data.model_copy(update={"sources": [source]})
    site = Site(tmp_path, spec.model_copy(update={"data": data}))
    with site.origin(), site.serving():
        site.worker()[1].site()
        # when a validator starts that has others, then it says what to do
        rows.write_bytes(b"other rows")
        with pytest.raises(RunStopped, match="the coordinator are made from other data") as caught:
            start(site, tmp_path)
    assert "give both the same files" in (caught.value.remedy or "")


def test_one_that_pins_another_root_than_the_profiles_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path, with_profile(tiny_spec(), document(made_profile()), ROOT.public_hex))
    with site.origin(), site.serving(), pytest.raises(RunStopped, match="is pinned"):
        start(site, tmp_path)
