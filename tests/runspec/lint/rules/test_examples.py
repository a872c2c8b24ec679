"""Every rule has a page, a bad example that only it finds, and a good one that nothing finds."""

from __future__ import annotations

from pathlib import Path

import pytest

import runspec.lint
from runspec.core.spec.findings import Finding
from runspec.core.spec.load import SpecFiles
from runspec.lint.check import check_spec
from runspec.lint.registry import RULES

EXAMPLES = Path(runspec.lint.__file__).parent / "examples"
MODELS = "models"  # what some examples point at


def findings(example: Path) -> list[Finding]:
    return check_spec(SpecFiles(example), environ={}).findings


@pytest.mark.parametrize("code", RULES)
def test_only_the_rule_finds_its_bad_example(code: str) -> None:
    found = findings(EXAMPLES / code / "bad.yaml")
    assert {finding.code for finding in found} == {code}
    assert all(finding.message and finding.line for finding in found)
    if RULES[code].check:
        assert all(finding.suggestion for finding in found)


@pytest.mark.parametrize("code", RULES)
def test_nothing_finds_the_good_example(code: str) -> None:
    assert findings(EXAMPLES / code / "good.yaml") == []


@pytest.mark.parametrize("base", ["base", "fleet"])
def test_what_examples_extend_is_clean(base: str) -> None:
    assert findings(EXAMPLES / f"{base}.yaml") == []


def test_every_example_is_a_rules() -> None:
    folders = {folder.name for folder in EXAMPLES.iterdir() if folder.is_dir()}
    assert folders - {MODELS} == set(RULES)


@pytest.mark.parametrize("code", RULES)
def test_a_page_says_what_must_hold_and_why(code: str) -> None:
    first, _, rest = RULES[code].page.partition("\n")
    assert first.endswith(".")
    assert len(rest.split()) >= 10
