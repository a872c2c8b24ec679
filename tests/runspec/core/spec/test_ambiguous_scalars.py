"""Scalars that YAML 1.1 reads otherwise: found where a person may have meant it, with a fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.spec.yaml_text import Reading, other_reading
from tests.runspec.core.spec.spec_files import load, small_spec


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        ("on", True),
        ("Yes", True),
        ("y", True),
        ("OFF", False),
        ("no", False),
        ("N", False),
        ("010", 8),
        ("-017", -15),
        ("08", "the text '08'"),
        ("0b11", 3),
        ("1_000", 1000),
        ("0xF_F", 255),
        ("1_000.5", 1000.5),
        ("12:30", 750),
        ("-1:30:00", -5400),
        ("1:30.5", 90.5),
        ("2026-01-31", "a date"),
        ("2026-01-31T10:00:00Z", "a date"),
    ],
)
def test_what_yaml_1_1_reads(text: str, reading: Reading) -> None:
    found = other_reading(text)
    assert (found, type(found)) == (reading, type(reading))


@pytest.mark.parametrize(
    ("overlay", "severity", "path", "fixed"),
    [
        # text where text belongs: quotes keep it
        ("name: no", "warning", "name", '"no"'),
        ("data: {length_prompt: 12:30}", "warning", "data.length_prompt", '"12:30"'),
        ("model: {hf: 2026-01-31}", "warning", "model.hf", '"2026-01-31"'),
        # a free map takes any type: what was read is written so that everything reads it
        ("data: {sources: {words: {params: {a: on}}}}", "warning", "data.sources.words.params.a",
         '"on"'),
        ("data: {sources: {words: {params: {a: 010}}}}", "warning", "data.sources.words.params.a",
         "10"),
        # the wrong type here, the right one by YAML 1.1
        ("algorithm: {filters: {zero_variance: yes}}", "error", "algorithm.filters.zero_variance",
         "true"),
        ("steps: 1_000", "error", "steps", "1000"),
        ("optimizer: {lr: 0.1_5}", "error", "optimizer.lr", "0.15"),
        ("steps: 12:30", "error", "steps", None),
        ("model: {revision: 010}", "error", "model.revision", '"010"'),
    ],
)  # fmt: skip
def test_ambiguous_scalars_are_found_with_what_to_write(
    tmp_path: Path, overlay: str, severity: str, path: str, fixed: str | None
) -> None:
    # given a spec with such a scalar, when it is checked
    found = load(small_spec(tmp_path, overlay)).findings
    # then the scalar is the only finding, with an edit of just its characters
    [finding] = [f for f in found if f.code == "ambiguous-scalar"]
    assert (finding.severity, finding.path) == (severity, path)
    assert (finding.fix.text if finding.fix else None) == fixed
    if finding.fix is not None:
        written = finding.source[finding.fix.start - 1 : finding.fix.end - 1]
        assert written == overlay.rpartition(": ")[2].rstrip("}")


@pytest.mark.parametrize(
    "overlay",
    ["seed: 010", "optimizer: {lr: 1e-6}", "optimizer: {lr: 001}", "name: 'no'", 'name: "on"',
     "reward: [{name: length, targets: [007, 010]}]", "model: {hf: nowhere}"],
)  # fmt: skip
def test_a_number_in_a_numeric_field_and_quoted_text_are_no_finding(
    tmp_path: Path, overlay: str
) -> None:
    found = load(small_spec(tmp_path, overlay)).findings
    assert [f for f in found if f.code in ("ambiguous-scalar", "wrong-type")] == []


@pytest.mark.parametrize(
    ("overlay", "text"),
    [
        ('steps: "100"', "100"),
        ("algorithm: {filters: {zero_variance: 'true'}}", "true"),
        ("model: {revision: 1234567}", '"1234567"'),
        ("model: {revision: 12345e7}", '"12345e7"'),
    ],
)
def test_a_value_of_the_right_characters_is_mended_by_quotes_or_without(
    tmp_path: Path, overlay: str, text: str
) -> None:
    [finding] = [f for f in load(small_spec(tmp_path, overlay)).findings if f.code == "wrong-type"]
    assert finding.fix is not None
    assert finding.fix.text == text
