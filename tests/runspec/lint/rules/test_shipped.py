"""Shipped specs are clean, as they are and with every profile; findings point at their layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.spec.load import SpecFiles
from runspec.lint.check import check_files
from tests.runspec.core.spec.spec_files import SHIPPED, SPECS, load, small_spec

PROFILES = ["", *sorted(path.stem for path in (SPECS / "profiles").iterdir())]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_shipped_spec_is_clean(profile: str) -> None:
    spec, _, name = profile.rpartition(".")  # SPEC.NAME is the profile of one spec
    shipped = [path for path in SHIPPED if spec in ("", path.stem)]
    assert len(shipped) >= (1 if spec else 3)
    checked = check_files([SpecFiles(path, name or None) for path in shipped])
    assert (checked.findings, checked.unreadable) == ([], [])


def test_a_rule_points_at_the_layer_that_wrote_the_value(tmp_path: Path) -> None:
    loaded = load(small_spec(tmp_path, "algorithm:\n  updates_per_step: 3\n"))
    [finding] = loaded.findings
    assert (Path(finding.file).name, finding.line, finding.column) == ("spec.yaml", 3, 21)
    assert loaded.spec is not None  # it fits the schema, but must not run
