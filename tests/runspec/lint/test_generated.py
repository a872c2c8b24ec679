"""Generated specs are clean: no rule finds what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from runspec.core.spec.load import SpecFiles
from runspec.lint.check import check_spec
from tests.runspec.lint.generated import valid_spec

SPECS = 100


def codes(folder: Path, text: str) -> set[str]:
    path = folder / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    return {finding.code for finding in check_spec(SpecFiles(path)).findings}


@pytest.mark.parametrize("tenth", range(10))
def test_generated_specs_are_clean(tmp_path: Path, tenth: int) -> None:
    for seed in range(tenth, SPECS, 10):
        text = yaml.safe_dump(valid_spec(seed), sort_keys=False)
        assert codes(tmp_path, text) == set(), f"seed {seed}:\n{text}"
