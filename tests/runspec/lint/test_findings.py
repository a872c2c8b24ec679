"""What becomes of findings: selected, suppressed, mended (`--fix`) and printed."""

from __future__ import annotations

import json
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from runspec.core.errors import UserError
from runspec.core.schema.findings import Finding, Place
from runspec.core.schema.load import SpecFiles
from runspec.lint import RULES, Group
from runspec.lint.check import CheckedFiles, Unreadable, check_files, selection
from runspec.lint.formats import FORMATS, fix_texts, render, write_fixed
from tests.harness import ROOT
from tests.runspec.core.schema.spec_files import codes, load, small_spec, write

PAGE = ROOT / "docs" / "lint.md"
HEADING = "## Rules\n"
WHY = 'reason="a test"'
IGNORE = f"# runspec: ignore[ambiguous-scalar] {WHY}"


def table() -> str:
    """The page's table of rules, as it must be."""
    rows = ["| group | code | severity | what must hold |", "|---|---|---|---|"]
    for group in get_args(Group):
        for rule in RULES.values():
            if rule.group == group:
                summary = rule.summary.replace("|", "\\|")
                rows.append(f"| {group} | `{rule.code}` | {rule.severity} | {summary} |")
    return "\n".join(rows) + "\n"


def write_page() -> None:
    """Writes the table into the page, where rules have changed."""
    text = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
    PAGE.write_text(text + HEADING + table(), encoding="utf-8")


def test_the_page_has_the_table_of_the_rules():
    assert PAGE.read_text(encoding="utf-8").partition(HEADING)[2] == table(), (
        'python -c "from tests.runspec.lint.test_findings import write_page; write_page()"'
    )


def test_all_rules_are_selected_unless_some_are_named():
    of_file = {code for code, rule in RULES.items() if rule.group == "file"}
    named = {"versions-kept", "unknown-key", "yaml"}
    assert selection([], []) == set(RULES)
    assert selection(["file"], []) == of_file
    assert selection(["versions-kept,unknown-key", "yaml"], []) == named
    assert selection([], ["file"]) == set(RULES) - of_file
    assert selection(["file"], ["unknown-key"]) == of_file - {"unknown-key"}


@pytest.mark.parametrize("words", [["verisons-kept"], ["unknown-key, "], [""], ["*"]])
def test_a_word_that_is_neither_rule_nor_group_is_bad_usage(words):
    for select, ignore in ((words, []), ([], words)):
        with pytest.raises(UserError, match="no rule or group"):
            selection(select, ignore)


def test_what_leaves_no_spec_is_shown_whatever_is_selected(tmp_path):
    checked = check_files([SpecFiles(small_spec(tmp_path, "seed: -1"))])
    assert len(checked.only({"versions-kept"}).findings) == 1


@pytest.mark.parametrize(
    ("holds", "overlay"),
    [
        (True, f"name: no {IGNORE}"),
        (True, f"{IGNORE}\nname: no"),
        (True, f"name:\n  {IGNORE}\n  no"),
        (True, f"name: {IGNORE}\n  no"),
        (True, f"data: {IGNORE}\n  sources:\n    words:\n      params:\n        a: on\n"),
        (True, f"{IGNORE}\ndata:\n  sources:\n    words: {{params: {{a: on}}}}\n"),
        (True, f"data:\n  sources:\n    - name: words {IGNORE}\n      params: {{a: on}}\n"),
        (True, f"name: no # runspec: ignore[unknown-key,ambiguous-scalar] {WHY}\nx: 1"),
        (False, f"name: no\nseed: 1 {IGNORE}"),
        (False, f"{IGNORE}\nseed: 1\nname: no"),
        (False, f"name: no # runspec: ignore[unknown-key] {WHY}"),
        (False, f"data: {{sources: {{words: {{size: 2}}}}}} {IGNORE}\nname: no"),
    ],
)
def test_a_suppression_takes_away_what_it_stands_beside_and_nothing_else(tmp_path, holds, overlay):
    loaded = load(small_spec(tmp_path, overlay))
    suppressed = [(one.finding.code, one.reason) for one in loaded.suppressed]
    assert suppressed == ([("ambiguous-scalar", "a test")] if holds else [])
    assert ("ambiguous-scalar" in codes(loaded)) != holds
    assert holds or "unused-suppression" in codes(loaded)


def test_rules_are_suppressed_in_the_layer_that_wrote_the_value(tmp_path):
    # given a base that says why its value is right
    path, base = small_spec(tmp_path, "name: other"), tmp_path / "base.yaml"
    kept = f"broadcast: {{keep_versions: 3}} # runspec: ignore[versions-kept] {WHY}\nseed: 1"
    base.write_text(base.read_text().replace("seed: 1", kept))
    assert codes(load(path)) == []
    # when the spec writes the value, then the base's suppression is not about it
    write(path, "extends: [base.yaml]\nbroadcast: {keep_versions: 3}")
    assert codes(load(path)) == ["versions-kept"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("seed: -1", "bad-value"),
        ('steps: "3"', "wrong-type"),
        ("optimizer: {lr: null}", "missing-key"),
        ("steps: ${NOT_SET}", "variable"),
        ("extends: [gone.yaml]", "extends"),
        ("verify: {lease_timeout: 3}", "unit"),
        ("algorithm: {filters: {zero_variance: on}}", "ambiguous-scalar"),
        ('secrets: [{name: T, from: {env: T}}]\nname: "${T}"', "secret-value"),
    ],
)
def test_what_keeps_a_spec_from_being_made_cannot_be_suppressed(tmp_path, line, code):
    path = small_spec(tmp_path)
    head = "" if code == "extends" else "extends: [base.yaml]\n"
    path.write_text(f"{head}{line} # runspec: ignore[{code}] {WHY}\n")
    loaded = load(path, **({"T": "x"} if code == "secret-value" else {}))
    assert (codes(loaded)[0], loaded.suppressed) == (code, [])


@pytest.mark.parametrize(
    ("comment", "code", "hint"),
    [
        ("ignore[ambiguous-scalar]", "suppression-reason", 'add reason="..."'),
        ('ignore[ambiguous-scalar] reason=" "', "suppression-reason", "add reason"),
        (f"ignore[ambiguous-scaler] {WHY}", "unknown-rule", "did you mean ambiguous-scalar?"),
        (f"ignore[qqqqqq] {WHY}", "unknown-rule", "`runspec explain --list`"),
        ("ignore", "malformed-suppression", "runspec: ignore[CODE]"),
        (f"ignore[] {WHY}", "malformed-suppression", "runspec: ignore[CODE]"),
        (f"ignore[ambiguous-scalar] because {WHY}", "malformed-suppression", "ignore["),
        ("mind the name", "malformed-suppression", "runspec: ignore[CODE]"),
    ],
)
def test_a_suppression_that_is_none_is_found_and_counts_for_nothing(tmp_path, comment, code, hint):
    loaded = load(small_spec(tmp_path, f"name: no # runspec: {comment}"))
    [faulty] = [finding for finding in loaded.findings if finding.code != "ambiguous-scalar"]
    assert (faulty.code, faulty.line) == (code, 2)
    assert hint in faulty.suggestion
    assert loaded.suppressed == []


def test_of_several_codes_those_of_no_use_are_named_and_taken_out(tmp_path):
    overlay = f"name: no # runspec: ignore[ambiguous-scalar, versions-kept] {WHY}"
    [finding] = load(small_spec(tmp_path, overlay)).findings
    assert finding.code == "unused-suppression" and "versions-kept" in finding.message
    assert finding.fix is not None and finding.fix.text == "ambiguous-scalar"


def test_where_a_model_lies_already_its_suppression_is_for_other_machines(tmp_path):
    path = small_spec(tmp_path, f"model: {{hf: ./model}} # runspec: ignore[model-path] {WHY}")
    assert codes(load(path)) == []
    (tmp_path / "model").rmdir()
    assert codes(load(path)) == []


def test_in_a_lower_layer_a_suppression_may_serve_another_spec(tmp_path):
    # given a suppression that the spec alone needs
    path = small_spec(tmp_path, f"name: no {IGNORE}")
    above = write(tmp_path / "above.yaml", "extends: [spec.yaml]\nname: above")
    write(tmp_path / "profiles/small.yaml", "name: small")
    # when something lies over it and it is of no use there, then nobody minds
    assert codes(load(above)) == codes(load(path, profile="small")) == []
    assert codes(load(path, "name=set")) == []
    # but a profile's own is the topmost
    write(tmp_path / "profiles/small.yaml", f"name: s {IGNORE}")
    assert codes(load(path, profile="small")) == ["unused-suppression"]


def test_of_specs_linted_together_one_may_need_it(tmp_path):
    # given a base whose suppression only its extension needs
    kept = f"broadcast: {{keep_versions: 4}} # runspec: ignore[versions-kept] {WHY}"
    base = SpecFiles(small_spec(tmp_path, kept))
    above = write(tmp_path / "above.yaml", "extends: [spec.yaml]\nalgorithm: {async_level: 3}")
    # when the base is linted alone it is unused, with the extension it is used
    alone, both = check_files([base]), check_files([base, SpecFiles(above)])
    assert [f.code for f in alone.findings] == ["unused-suppression"]
    assert both.findings == []
    assert [one.finding.code for one in both.suppressed] == ["versions-kept"]


def test_one_above_a_block_is_about_what_is_missing_in_it(tmp_path):
    path = small_spec(tmp_path)
    write(path, (tmp_path / "base.yaml").read_text().replace("hf: ./model, ", ""))
    assert "one-model" in codes(load(path))
    above = f"# runspec: ignore[one-model] {WHY}\nmodel: {{"
    write(path, path.read_text().replace("model: {", above))
    assert "one-model" not in codes(load(path))


def mended_text(path: Path) -> str:
    found = check_files([SpecFiles(path)])
    return fix_texts(found.findings, found.texts).texts[str(path)]


def mend(path: Path) -> None:
    found = check_files([SpecFiles(path)])
    write_fixed(fix_texts(found.findings, found.texts), found.texts)


def test_edits_change_their_characters_and_nothing_else(tmp_path):
    # given a file with comments, odd spacing, quotes and four things to mend
    overlay = (
        "# top\nname:   no   # a name\n\nalgorithm: { 'grop_size' :  \"8\", # how many\n"
        "   filters: {zero_variance: yes} }\n# end"
    )
    text = mended_text(small_spec(tmp_path, overlay))
    for old, new in (("  no ", '  "no" '), ("grop_size", "group_size"), ("yes", "true")):
        overlay = overlay.replace(old, new)
    assert text == f"extends: [base.yaml]\n{overlay}"


def test_a_suppression_of_no_use_goes_with_its_line(tmp_path):
    # given one alone on its line and one behind a value
    comment = '# runspec: ignore[versions-kept] reason="x"'
    path = small_spec(tmp_path, f"{comment}\nseed: 2\nsteps: 3   {comment}\nname: a")
    assert mended_text(path) == "extends: [base.yaml]\nseed: 2\nsteps: 3\nname: a"


def test_every_file_of_a_spec_is_mended(tmp_path):
    path, base = small_spec(tmp_path, "stepss: 4"), tmp_path / "base.yaml"
    base.write_text(base.read_text().replace("seed: 1", "sead: 1"))
    mend(path)
    assert check_files([SpecFiles(path)]).findings == []
    assert "seed: 1" in base.read_text()


@pytest.mark.parametrize(("ends", "mark"), [("\n", b"\xef\xbb\xbf"), ("\r\n", b"")])
def test_line_ends_byte_order_mark_mode_and_links_stay(tmp_path, ends, mark):
    # given a file of another system, with rights of its own, behind a link
    real = small_spec(tmp_path).rename(tmp_path / "real.yaml")
    text = ends.join(["extends: [base.yaml]", "name: no", "# end", ""])
    real.write_bytes(mark + text.encode())
    real.chmod(0o640)
    path = tmp_path / "spec.yaml"
    path.symlink_to(real)
    # when it is mended, then nothing of that has changed
    mend(path)
    assert real.read_bytes() == mark + text.replace("no", '"no"').encode()
    assert path.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_doubtful_file_stays_as_it_is(tmp_path):
    # given one value that two keys share, who each want it written in another way
    overlay = "algorithm: {filters: {zero_variance: &a on}}\nname: *a\nseed: 2"
    found = check_files([SpecFiles(small_spec(tmp_path, overlay))])
    fixed = fix_texts(found.findings, found.texts)
    assert fixed.texts == {}
    assert "two edits of line 2" in fixed.refused[str(tmp_path / "spec.yaml")]
    # and a file that somebody changed meanwhile
    path = small_spec(tmp_path, "name: no")
    found = check_files([SpecFiles(path)])
    path.write_text("name: other\n")
    with pytest.raises(UserError, match="changed while"):
        write_fixed(fix_texts(found.findings, found.texts), found.texts)
    assert path.read_text() == "name: other\n"


OVERLAY = 'name: no\nseed: -1\nalgorithm: {grop_size: "8, <&> ]]> 100%"}\n'
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
def checked(tmp_path, monkeypatch):
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


def test_pretty_shows_the_line_with_carets_and_what_was_measured(checked):
    text = render(checked, "pretty").replace(f"{Path.cwd()}/", "")
    assert (
        "broken/spec.yaml:4:13: error unknown-key: algorithm.grop_size: unknown key\n"
        ' 4 | algorithm: {grop_size: "8, <&> ]]> 100%"}\n'
        "   |             ^^^^^^^^^\n"
        "   = suggestion: did you mean group_size?  [--fix]"
    ) in text
    assert "--set:1:28: error " in text
    assert "   = measured: seed = -1\n   = requires: seed >= 0" in text
    assert f"   = requires: {RULES['updates-divide-batch'].summary}" in text
    assert "\x1b" not in text


def test_json_has_everything_of_a_finding(checked):
    content = json.loads(render(checked, "json"))
    gone = {"file": f"{Path.cwd()}/gone.yaml", "message": "no file\nhere", "remedy": "make one"}
    assert (content["version"], content["unreadable"]) == (2, [gone])
    assert content["summary"] == {"errors": checked.count("error"), "warnings": 1}
    assert [one["reason"] for one in content["suppressed"]] == ["a <test>, 100%"]
    found = {one["code"]: one for one in content["findings"]}
    assert found["bad-value"]["numbers"] == {"seed": -1}
    assert found["unknown-key"] == {
        "code": "unknown-key", "group": "file", "rule": RULES["unknown-key"].summary,
        "severity": "error", "path": "algorithm.grop_size", "message": "unknown key",
        "file": f"{Path.cwd()}/broken/spec.yaml", "line": 4, "column": 13, "end_column": 22,
        "source": 'algorithm: {grop_size: "8, <&> ]]> 100%"}', "numbers": {}, "requires": "",
        "suggestion": "did you mean group_size?", "blocking": False,
        "fix": {"line": 4, "start": 13, "end": 22, "text": "group_size"},
    }  # fmt: skip


def test_github_takes_nothing_from_a_finding_for_a_command(checked):
    # given paths with commas, colons and per cents
    lines = render(checked, "github").splitlines()
    assert lines[0] == "::error file=gone.yaml::no file%0Ahere"
    at = "title=runspec unknown-key,file=broken/spec.yaml,line=4,col=13,endColumn=22"
    said = "algorithm.grop_size: unknown key%0Adid you mean group_size?"
    assert any(line.startswith(f"::error {at}::{said}") for line in lines)
    # and text that looks like a command
    [line] = render(CheckedFiles([], [HOSTILE]), "github").splitlines()
    match = re.fullmatch(r"::error ([^:]*)::(.*)", line)
    assert match is not None and "file=dir%2Cx%3Ay/%250A.yaml" in match[1]
    assert r"50%25 of x: y, z\r%0A::error::no" in match[2]


def test_sarif_is_what_readers_expect(checked):
    [run] = json.loads(render(checked, "sarif"))["runs"]
    # sections 3.27.6 and 3.49.3: the index leads to the rule of the id; ids are unique
    rules, results = run["tool"]["driver"]["rules"], run["results"]
    assert [rule["id"] for rule in rules] == list(RULES)
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in results)
    # blanks, commas and per cents are no characters of a URI; `--set` has no file
    places = [result["locations"][0] for result in results]
    assert {p["physicalLocation"]["artifactLocation"]["uri"] for p in places if len(p) > 1} == {
        "broken/spec.yaml",
        "fine%2C%20100%25%3A%20a/spec.yaml",
    }
    [result] = [result for result in results if result["ruleId"] == "unknown-key"]
    [replacement] = result["fixes"][0]["artifactChanges"][0]["replacements"]
    assert replacement == {
        "deletedRegion": {"startLine": 4, "startColumn": 13, "endColumn": 22},
        "insertedContent": {"text": "group_size"},
    }
    reasons = [r["suppressions"][0]["justification"] for r in results if "suppressions" in r]
    assert reasons == ["a <test>, 100%"]
    # section 3.20.14: the run did not succeed, and says why
    [invocation] = run["invocations"]
    [notification] = invocation["toolExecutionNotifications"]
    assert invocation["executionSuccessful"] is False
    assert notification["message"]["text"] == "no file\nhere"


@pytest.mark.parametrize("name", FORMATS)
def test_hostile_text_breaks_no_format(name):
    text = render(CheckedFiles(["a\x00b"], [HOSTILE]), name)
    assert "\x1b" not in text
    if name in ("json", "sarif"):
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    if name == "compact":
        assert len(text.splitlines()) == 1
