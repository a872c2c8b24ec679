"""Formats for people and for CI: what they say, and that nothing in a finding breaks them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runspec.core.spec.findings import Finding, Place
from runspec.lint.formats import FORMATS, compact, github, pretty
from runspec.lint.formats import json as json_format
from runspec.lint.registry import RULES
from runspec.lint.report import Report
from tests.runspec.lint.formats.reports import full_report


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.chdir(tmp_path)
    return full_report(tmp_path)


HOSTILE = Finding(
    Place("dir,x:y/%0A.yaml", 1, 1, source="\tkey: \x1b[2J", width=3),
    "unknown-key",
    "50% of x: y, z\r\n::error::no <b>&\x00\ud800",
    path='a\x1b[31m"b\nc',
    numbers={"share": float("inf")},
    suggestion="a\nb",
)
"""What no spec that was read can make, and a finding may hold none the less."""


def test_there_is_a_module_for_every_format() -> None:
    folder = Path(compact.__file__).parent
    assert {path.stem for path in folder.glob("[a-z]*.py")} == set(FORMATS)


def test_pretty_shows_the_line_with_carets_and_what_was_measured(report: Report) -> None:
    # given findings with a place, numbers and a suggestion, when they are shown without colour
    text = pretty.render(report).replace(f"{Path.cwd()}/", "")
    # then each has its place, code, line, carets, numbers, inequality and hint
    assert (
        "broken/spec.yaml:4:13: error unknown-key: algorithm.grop_size: unknown key\n"
        ' 4 | algorithm: {grop_size: "8, <&> ]]> 100%"}\n'
        "   |             ^^^^^^^^^\n"
        "   = suggestion: did you mean group_size?  [--fix]"
    ) in text
    assert "--set:1:28: error " in text
    assert re.search(r"   = measured: seed = -1\n   = requires: seed >= 0", text)
    assert "\x1b" not in text


def test_json_has_everything_of_a_finding(report: Report) -> None:
    content = json.loads(json_format.render(report))
    assert content["version"] == 2
    assert content["files"] == report.files
    assert content["summary"] == {"errors": report.count("error"), "warnings": 1}
    assert len(content["suppressed"]) == 1
    assert content["suppressed"][0]["reason"] == "a <test>, 100%"
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
    assert found["bad-value"]["requires"] == "seed >= 0"


def test_github_commands_are_escaped(report: Report) -> None:
    # given paths with commas, colons and per cents
    lines = github.render(report).splitlines()
    assert len(lines) == 1 + len(report.findings)
    assert lines[0] == "::error file=gone.yaml::no file%0Ahere"
    assert any(
        line.startswith(
            "::error title=runspec unknown-key,file=broken/spec.yaml,line=4,col=13,endColumn=22::"
            "algorithm.grop_size: unknown key%0Adid you mean group_size?"
        )
        for line in lines
    )
    # an override has no file
    assert [line for line in lines if "file=" not in line and line.startswith("::error title=")]


def test_github_takes_nothing_from_a_finding_for_a_command() -> None:
    [line] = github.render(Report([], [HOSTILE])).splitlines()
    command, data = re.fullmatch(r"::(error [^:]*)::(.*)", line).groups()  # type: ignore[union-attr]
    assert "file=dir%2Cx%3Ay/%250A.yaml" in command
    assert r"50%25 of x: y, z\r%0A::error::no" in data


@pytest.mark.parametrize("name", FORMATS)
def test_hostile_text_breaks_no_format(name: str) -> None:
    from importlib import import_module

    text = import_module(f"runspec.lint.formats.{name}").render(Report(["a\x00b"], [HOSTILE]))
    assert "\x1b" not in text
    if name in ("json", "sarif"):
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    if name == "compact":
        assert len(text.splitlines()) == 1
