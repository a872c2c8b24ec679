"""Every rule has a page, a bad example that only it finds, and a good one that nothing finds."""

from __future__ import annotations

import pytest

from runspec.lint.registry import RULES
from tests.runspec.core.spec.spec_files import EXAMPLES, load

MODELS = "models"  # what some examples point at; `problems` is of `lint --data`, in test_lint.py


@pytest.mark.parametrize("code", [code for code in RULES if code != "problems"])
def test_only_the_rule_finds_its_bad_example(code: str) -> None:
    found = load(EXAMPLES / code / "bad.yaml").findings
    assert {finding.code for finding in found} == {code}
    assert all(finding.message and finding.line for finding in found)
    if RULES[code].check:
        assert all(finding.suggestion for finding in found)


@pytest.mark.parametrize("code", RULES)
def test_nothing_finds_the_good_example(code: str) -> None:
    assert load(EXAMPLES / code / "good.yaml").findings == []


@pytest.mark.parametrize("base", ["base", "fleet", "documents"])
def test_what_examples_extend_is_clean(base: str) -> None:
    assert load(EXAMPLES / f"{base}.yaml").findings == []


def test_every_example_is_a_rules() -> None:
    folders = {folder.name for folder in EXAMPLES.iterdir() if folder.is_dir()}
    assert folders - {MODELS} == set(RULES)


@pytest.mark.parametrize("code", RULES)
def test_a_page_says_what_must_hold_and_why(code: str) -> None:
    first, _, rest = RULES[code].page.partition("\n")
    assert first.endswith(".")
    assert len(rest.split()) >= 10
