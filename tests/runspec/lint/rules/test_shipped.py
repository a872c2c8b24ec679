"""Shipped specs are clean, as they are and with every profile; findings point at their layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.spec.load import SpecFiles
from runspec.lint.check import check_files
from tests.runspec.core.spec.spec_files import SPECS, load, small_spec

NAMES = {path.stem.rpartition(".")[2] for path in (SPECS / "profiles").iterdir()}
PROFILES = [None, *sorted(NAMES)]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_shipped_spec_is_clean(profile: str | None) -> None:
    shipped = sorted(SPECS.glob("*.yaml"))
    assert len(shipped) >= 3
    assert check_files([SpecFiles(path, profile) for path in shipped]).findings == []


def test_a_rule_points_at_the_layer_that_wrote_the_value(tmp_path: Path) -> None:
    loaded = load(small_spec(tmp_path, "algorithm:\n  updates_per_step: 3\n"))
    [finding] = loaded.findings
    assert (Path(finding.file).name, finding.line, finding.column) == ("spec.yaml", 3, 21)
    assert loaded.spec is not None  # it fits the schema, but must not run
