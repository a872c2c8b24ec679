"""SARIF against the constraints of the standard, for everything that we write of it.

`SUBSET` says of each object that we write what section 3 of "SARIF Version 2.1.0 Plus Errata 01"
(OASIS, 2023) says: which properties it may have, which it must have, their types and values.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from runspec.core.spec.findings import Place, finding_at
from runspec.lint.formats import sarif
from runspec.lint.registry import RULES
from runspec.lint.report import Report
from tests.runspec.lint.formats.reports import full_report

Json = dict[str, Any]


def exactly(required: str, **properties: Json) -> Json:
    """An object with these properties and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def some(item: Json, **more: Any) -> Json:
    return {"type": "array", "items": item, **more}


TEXT = {"type": "string", "minLength": 1}
FROM_1 = {"type": "integer", "minimum": 1}
BAG = {"type": "object"}
LEVEL = {"enum": ["none", "note", "warning", "error"]}
MESSAGE = exactly("text", text=TEXT)  # 3.11.8
CONTENT = exactly("text", text={"type": "string"})  # 3.3: may be empty
ARTIFACT = exactly(  # 3.4
    "uri", uri={**TEXT, "format": "uri-reference"}, uriBaseId=TEXT
)
REGION = exactly(  # 3.30
    "startLine", startLine=FROM_1, startColumn=FROM_1, endColumn=FROM_1, snippet=CONTENT
)
PHYSICAL = exactly("artifactLocation", artifactLocation=ARTIFACT, region=REGION)  # 3.29
LOCATION = exactly(  # 3.28
    "",
    physicalLocation=PHYSICAL,
    logicalLocations=some(exactly("fullyQualifiedName", fullyQualifiedName=TEXT), minItems=1),
)
FIX = exactly(  # 3.55 to 3.57
    "artifactChanges",
    description=MESSAGE,
    artifactChanges=some(
        exactly(
            "artifactLocation replacements",
            artifactLocation=ARTIFACT,
            replacements=some(
                exactly("deletedRegion", deletedRegion=REGION, insertedContent=CONTENT), minItems=1
            ),
        ),
        minItems=1,
        uniqueItems=True,
    ),
)
SUPPRESSION = exactly(  # 3.35
    "kind",
    kind={"enum": ["inSource", "external"]},
    status={"enum": ["accepted", "underReview", "rejected"]},
    justification=TEXT,
)
RESULT = exactly(  # 3.27
    "message",
    ruleId=TEXT,
    ruleIndex={"type": "integer", "minimum": 0},
    level=LEVEL,
    message=MESSAGE,
    locations=some(LOCATION),
    partialFingerprints={"type": "object", "additionalProperties": {"type": "string"}},
    fixes=some(FIX, uniqueItems=True),
    suppressions=some(SUPPRESSION, uniqueItems=True),
    properties=BAG,
)
RULE = exactly(  # 3.49
    "id",
    id=TEXT,
    shortDescription=MESSAGE,
    fullDescription=MESSAGE,
    help=MESSAGE,
    defaultConfiguration=exactly("", level=LEVEL),
    properties=BAG,
)
INVOCATION = exactly(  # 3.20, 3.58
    "executionSuccessful",
    executionSuccessful={"type": "boolean"},
    toolExecutionNotifications=some(
        exactly("message", level=LEVEL, message=MESSAGE, locations=some(LOCATION))
    ),
)
RUN = exactly(  # 3.14, 3.18, 3.19
    "tool",
    tool=exactly(
        "driver",
        driver=exactly("name", name=TEXT, version=TEXT, rules=some(RULE, uniqueItems=True)),
    ),
    invocations=some(INVOCATION),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    results=some(RESULT),
)
SUBSET = exactly(  # 3.13
    "version runs",
    **{"$schema": {**TEXT, "format": "uri"}},
    version={"const": "2.1.0"},
    runs=some(RUN),
)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Json:
    monkeypatch.chdir(tmp_path)
    return json.loads(sarif.render(full_report(tmp_path)))


def test_every_object_is_what_the_standard_says(log: Json) -> None:
    validator = jsonschema.Draft202012Validator(
        SUBSET, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    assert [error.message for error in validator.iter_errors(log)] == []


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


def test_a_name_that_is_not_utf8_is_a_uri_too() -> None:
    # given a file whose name is any bytes, as the file system allows
    finding = finding_at(Place(os.fsdecode(b"a\xff.yaml"), 1, 1), "yaml", "an empty file")
    log = json.loads(sarif.render(Report([], [finding])))
    # then its URI has them, escaped
    [result] = log["runs"][0]["results"]
    location = result["locations"][0]["physicalLocation"]["artifactLocation"]
    assert location["uri"] == "a%FF.yaml"
