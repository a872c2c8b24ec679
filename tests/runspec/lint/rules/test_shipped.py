"""Shipped specs are clean, as they are and with every profile; findings point at their layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.spec.load import SpecFiles
from runspec.lint.check import check_files
from tests.runspec.core.spec.spec_files import SPECS, load, small_spec

PROFILES = [None, *sorted(path.stem for path in (SPECS / "profiles").glob("*.yaml"))]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_shipped_spec_is_clean(profile: str | None) -> None:
    shipped = sorted(SPECS.glob("*.yaml"))
    assert len(shipped) >= 3
    assert check_files([SpecFiles(path, profile) for path in shipped]).findings == []


@pytest.mark.parametrize("placement", sorted((SPECS / "placements").glob("*.yaml")), ids=str)
def test_every_shipped_placement_is_clean(placement: Path) -> None:
    recipes = [SPECS / f"target_{name}.yaml" for name in ("short", "long")]
    found = check_files([SpecFiles(path, placement=placement) for path in recipes]).findings
    assert found == []


def test_the_papers_length_penalty_is_suppressed_with_its_reason() -> None:
    checked = check_files([SpecFiles(SPECS / "target_long.yaml")])
    [found] = [s for s in checked.suppressed if s.finding.code == "length-swamps-task"]
    assert "paper's own alpha" in found.reason
    assert found.finding.numbers == {"alpha": 3e-4, "distance": 30768, "max_new_tokens": 32768}


def test_a_rule_points_at_the_layer_that_wrote_the_value(tmp_path: Path) -> None:
    loaded = load(small_spec(tmp_path, "algorithm:\n  updates_per_step: 3\n"))
    [finding] = loaded.findings
    assert (Path(finding.file).name, finding.line, finding.column) == ("spec.yaml", 3, 21)
    assert loaded.spec is not None  # it fits the schema, but must not run
