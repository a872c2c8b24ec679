"""A baseline knows findings by what they are about, not by where they stand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.spec.findings import Finding
from runspec.lint.baseline import Split, split, write_baseline
from runspec.lint.registry import RULES
from tests.runspec.core.spec.spec_files import load, small_spec

OVERLAY = "name: no\nbroadcast: {keep_versions: 3}\n"


def compare(found: list[Finding], baseline: Path) -> Split:
    """Against a baseline, where all rules looked at a small spec."""
    return split(found, baseline, codes=RULES, files=[str(baseline.parent / "spec.yaml")])


def test_known_findings_are_not_new_where_lines_move(tmp_path: Path) -> None:
    # given a baseline of two findings
    baseline = tmp_path / "lint" / "baseline.json"
    found = load(small_spec(tmp_path, OVERLAY)).findings
    assert write_baseline(found, baseline) == 2
    # when lines come above them, then both are known still
    moved = load(small_spec(tmp_path, "# more\n\n" + OVERLAY)).findings
    assert [f.line for f in moved] != [f.line for f in found]
    parts = compare(moved, baseline)
    assert (parts.new, parts.known, parts.gone) == ([], 2, 0)


def test_what_changed_is_new_and_what_went_is_gone(tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    write_baseline(load(small_spec(tmp_path, OVERLAY)).findings, baseline)
    # when one line says another value and the other finding is mended
    found = load(small_spec(tmp_path, "broadcast: {keep_versions: 2}")).findings
    parts = compare(found, baseline)
    # then the finding of the changed line is new
    assert ([f.code for f in parts.new], parts.known, parts.gone) == (["versions-kept"], 0, 2)


def test_only_what_was_looked_for_is_gone(tmp_path: Path) -> None:
    # given a baseline of two findings in one file, which are mended
    baseline = tmp_path / "baseline.json"
    write_baseline(load(small_spec(tmp_path, OVERLAY)).findings, baseline)
    spec = str(tmp_path / "spec.yaml")
    # when other files, or fewer rules, are looked at, then the rest may be there still
    assert split([], baseline, codes=RULES, files=["other.yaml"]).gone == 0
    assert split([], baseline, codes={"versions-kept"}, files=[spec]).gone == 1
    assert split([], baseline, codes=RULES, files=[spec]).gone == 2


def test_as_many_are_known_as_were_there(tmp_path: Path) -> None:
    # given one unknown key, then the same line twice
    baseline = tmp_path / "baseline.json"
    line = "data: {sources: {words: {params: {%s}}}}"
    write_baseline(load(small_spec(tmp_path, "name: on")).findings, baseline)
    found = load(small_spec(tmp_path, "name: on")).findings
    parts = compare([*found, *found], baseline)
    assert (len(parts.new), parts.known) == (1, 1)
    assert load(small_spec(tmp_path, line % "a: 1")).findings == []


def test_what_leaves_no_spec_is_never_known(tmp_path: Path) -> None:
    found = load(small_spec(tmp_path, "seed: -1")).findings
    baseline = tmp_path / "baseline.json"
    assert write_baseline(found, baseline) == 0
    assert compare(found, baseline).new == found


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"version": 1}', '{"version": 2, "findings": []}', "\xff",
     '{"version": 1, "findings": [1]}', '{"version": 1, "findings": [{"code": "x"}]}',
     '{"version": 1, "findings": [{"code": 1, "path": "", "file": "", "source": ""}]}'],
)  # fmt: skip
def test_a_file_that_is_no_baseline_is_bad_usage(tmp_path: Path, text: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="baseline"):
        compare([], path)


def test_a_baseline_that_is_not_there_is_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the baseline"):
        compare([], tmp_path / "gone.json")


def test_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="no regular file"):
        compare([], tmp_path / "pipe")
