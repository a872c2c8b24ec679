"""SARIF 2.1.0: results, rules, regions, fixes and suppressions as readers expect them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runspec.lint.formats import sarif
from runspec.lint.registry import RULES
from runspec.lint.report import Report
from tests.runspec.lint.formats.reports import full_report

Json = dict[str, Any]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Json:
    monkeypatch.chdir(tmp_path)
    return json.loads(sarif.render(full_report(tmp_path)))


def test_results_and_rules_name_each_other(log: Json) -> None:
    # sections 3.27.6 and 3.49.3: the index leads to the rule of the id; ids are unique
    [run] = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]


def test_regions_are_in_their_files_and_relative_to_the_root(log: Json, tmp_path: Path) -> None:
    [run] = log["runs"]
    uris = set()
    for result in run["results"]:
        [location] = result["locations"]
        if "physicalLocation" not in location:  # of --set
            assert location["logicalLocations"]
            continue
        artifact = location["physicalLocation"]["artifactLocation"]
        region = location["physicalLocation"]["region"]
        uris.add(artifact["uri"])
        assert artifact["uriBaseId"] == "%SRCROOT%"
        assert region.get("endColumn", region["startColumn"]) <= len(region["snippet"]["text"]) + 1
    # blanks, commas and per cents are no characters of a URI
    assert uris == {"broken/spec.yaml", "fine%2C%20100%25%3A%20a/spec.yaml"}


def test_a_fix_says_what_to_put_where(log: Json) -> None:
    [result] = [r for r in log["runs"][0]["results"] if r["ruleId"] == "unknown-key"]
    [change] = result["fixes"][0]["artifactChanges"]
    assert change["replacements"] == [
        {
            "deletedRegion": {"startLine": 4, "startColumn": 13, "endColumn": 22},
            "insertedContent": {"text": "group_size"},
        }
    ]


def test_a_suppressed_finding_is_a_result_with_its_reason(log: Json) -> None:
    suppressed = [r for r in log["runs"][0]["results"] if "suppressions" in r]
    assert [(r["ruleId"], r["suppressions"][0]["justification"]) for r in suppressed] == [
        ("versions-kept", "a <test>, 100%")
    ]


def test_a_spec_that_cannot_be_read_is_no_result(log: Json, tmp_path: Path) -> None:
    # section 3.20.14: the run did not succeed, and says why
    [invocation] = log["runs"][0]["invocations"]
    assert invocation["executionSuccessful"] is False
    [notification] = invocation["toolExecutionNotifications"]
    assert notification["message"]["text"] == "no file\nhere"
    clean = json.loads(sarif.render(Report([], [])))["runs"][0]
    assert clean["invocations"] == [{"executionSuccessful": True}]
    assert clean["results"] == []
