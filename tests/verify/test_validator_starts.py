"""Validators that would judge by other profiles than the run's end at their start."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from runspec.core.process import RunStopped
from tests.verify.coordinator.deployment import RUN, Site, tiny_spec
from tests.verify.profiles import ROOT, document, made_profile
from tests.verify.test_profile import with_profile
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


def test_one_that_pins_another_root_than_the_profiles_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path, with_profile(tiny_spec(), document(made_profile()), ROOT.public_hex))
    with site.origin(), site.serving(), pytest.raises(RunStopped, match="is pinned"):
        start(site, tmp_path)
