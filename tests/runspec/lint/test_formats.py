"""Formats for people, CI and programs: what they say, and that nothing in a finding breaks them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.spec.findings import Finding, Place
from runspec.core.spec.load import SpecFiles
from runspec.lint.check import CheckedFiles, Unreadable, check_files
from runspec.lint.formats import FORMATS, render
from runspec.lint.registry import RULES
from tests.runspec.core.spec.spec_files import small_spec

OVERLAY = """\
name: no
seed: -1
algorithm: {grop_size: "8, <&> ]]> 100%"}
"""
FINE = """\
data: {length_prompt: "é {target}"}   # a text
broadcast: {keep_versions: 3}   # runspec: ignore[versions-kept] reason="a <test>, 100%"
"""
HOSTILE = Finding(
    Place("dir,x:y/%0A.yaml", 1, 1, source="\tkey: \x1b[2J", width=3),
    "unknown-key",
    "50% of x: y, z\r\n::error::no <b>&\x00\ud800",
    path='a\x1b[31m"b\nc',
    numbers={"share": float("inf")},
    suggestion="a\nb",
)
"""What no spec that was read can make, and a finding may hold none the less."""


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckedFiles:
    """Two errors and a warning in one file, one suppressed in another, one of `--set`, one gone."""
    monkeypatch.chdir(tmp_path)
    fine = small_spec(tmp_path / "fine, 100%: a", FINE)
    specs = [
        SpecFiles(small_spec(tmp_path / "broken", OVERLAY)),
        SpecFiles(fine),
        SpecFiles(fine, overrides=["algorithm.updates_per_step=3"]),
    ]
    gone = Unreadable(str(tmp_path / "gone.yaml"), UserError("no file\nhere", remedy="make one"))
    return replace(check_files(specs), unreadable=[gone])


def test_pretty_shows_the_line_with_carets_and_what_was_measured(checked: CheckedFiles) -> None:
    text = render(checked, "pretty").replace(f"{Path.cwd()}/", "")
    assert (
        "broken/spec.yaml:4:13: error unknown-key: algorithm.grop_size: unknown key\n"
        ' 4 | algorithm: {grop_size: "8, <&> ]]> 100%"}\n'
        "   |             ^^^^^^^^^\n"
        "   = suggestion: did you mean group_size?  [--fix]"
    ) in text
    assert "--set:1:28: error " in text
    assert re.search(r"   = measured: seed = -1\n   = requires: seed >= 0", text)
    assert f"   = requires: {RULES['updates-divide-batch'].summary}" in text
    assert "\x1b" not in text


def test_json_has_everything_of_a_finding(checked: CheckedFiles) -> None:
    content = json.loads(render(checked, "json"))
    assert content["version"] == 2
    assert content["summary"] == {"errors": checked.count("error"), "warnings": 1}
    assert [one["reason"] for one in content["suppressed"]] == ["a <test>, 100%"]
    assert content["unreadable"] == [
        {"file": str(Path.cwd() / "gone.yaml"), "message": "no file\nhere", "remedy": "make one"}
    ]
    found = {one["code"]: one for one in content["findings"]}
    assert found["unknown-key"] == {
        "code": "unknown-key",
        "group": "file",
        "rule": RULES["unknown-key"].summary,
        "severity": "error",
        "path": "algorithm.grop_size",
        "message": "unknown key",
        "file": str(Path.cwd() / "broken/spec.yaml"),
        "line": 4,
        "column": 13,
        "end_column": 22,
        "source": 'algorithm: {grop_size: "8, <&> ]]> 100%"}',
        "numbers": {},
        "requires": "",
        "suggestion": "did you mean group_size?",
        "fix": {"line": 4, "start": 13, "end": 22, "text": "group_size"},
        "blocking": False,
    }
    assert found["bad-value"]["numbers"] == {"seed": -1}


def test_github_takes_nothing_from_a_finding_for_a_command(checked: CheckedFiles) -> None:
    # given paths with commas, colons and per cents
    lines = render(checked, "github").splitlines()
    assert lines[0] == "::error file=gone.yaml::no file%0Ahere"
    assert any(
        line.startswith(
            "::error title=runspec unknown-key,file=broken/spec.yaml,line=4,col=13,endColumn=22::"
            "algorithm.grop_size: unknown key%0Adid you mean group_size?"
        )
        for line in lines
    )
    # and text that looks like a command
    [line] = render(CheckedFiles([], [HOSTILE]), "github").splitlines()
    command, data = re.fullmatch(r"::(error [^:]*)::(.*)", line).groups()  # type: ignore[union-attr]
    assert "file=dir%2Cx%3Ay/%250A.yaml" in command
    assert r"50%25 of x: y, z\r%0A::error::no" in data


def test_sarif_is_what_readers_expect(checked: CheckedFiles) -> None:
    [run] = json.loads(render(checked, "sarif"))["runs"]
    # sections 3.27.6 and 3.49.3: the index leads to the rule of the id; ids are unique
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    places = [result["locations"][0] for result in run["results"]]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    # blanks, commas and per cents are no characters of a URI; `--set` has no file
    artifacts = [p["physicalLocation"]["artifactLocation"] for p in places if len(p) > 1]
    assert {artifact["uri"] for artifact in artifacts} == {
        "broken/spec.yaml",
        "fine%2C%20100%25%3A%20a/spec.yaml",
    }
    [result] = [result for result in run["results"] if result["ruleId"] == "unknown-key"]
    assert result["fixes"][0]["artifactChanges"][0]["replacements"] == [
        {
            "deletedRegion": {"startLine": 4, "startColumn": 13, "endColumn": 22},
            "insertedContent": {"text": "group_size"},
        }
    ]
    reasons = [r["suppressions"][0]["justification"] for r in run["results"] if "suppressions" in r]
    assert reasons == ["a <test>, 100%"]
    # section 3.20.14: the run did not succeed, and says why
    [invocation] = run["invocations"]
    assert invocation["executionSuccessful"] is False
    [notification] = invocation["toolExecutionNotifications"]
    assert notification["message"]["text"] == "no file\nhere"


@pytest.mark.parametrize("name", FORMATS)
def test_hostile_text_breaks_no_format(name: str) -> None:
    text = render(CheckedFiles(["a\x00b"], [HOSTILE]), name)
    assert "\x1b" not in text
    if name in ("json", "sarif"):
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    if name == "compact":
        assert len(text.splitlines()) == 1
