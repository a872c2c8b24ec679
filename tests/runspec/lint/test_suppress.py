"""`# runspec: ignore[CODE] reason="..."`: what it takes away, where, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.spec.load import SpecFiles
from runspec.lint.check import check_files
from tests.runspec.core.spec.spec_files import codes, load, small_spec, write

WHY = 'reason="a test"'


@pytest.mark.parametrize(
    "overlay",
    [
        # behind the value
        f"name: no # runspec: ignore[ambiguous-scalar] {WHY}",
        # above the key
        f"# runspec: ignore[ambiguous-scalar] {WHY}\nname: no",
        # above the value alone
        f"name:\n  # runspec: ignore[ambiguous-scalar] {WHY}\n  no",
        # behind the key
        f"name: # runspec: ignore[ambiguous-scalar] {WHY}\n  no",
        # behind a key above
        f"data: # runspec: ignore[ambiguous-scalar] {WHY}\n"
        "  sources:\n    words:\n      params:\n        a: on\n",
        # above a key above
        f"# runspec: ignore[ambiguous-scalar] {WHY}\n"
        "data:\n  sources:\n    words: {params: {a: on}}\n",
        # behind the first key of an item, which begins there
        "data:\n  sources:\n"
        f"    - name: words # runspec: ignore[ambiguous-scalar] {WHY}\n"
        "      params: {a: on}\n",
        # several
        f"name: no # runspec: ignore[unknown-key,ambiguous-scalar] {WHY}\nx: 1",
    ],
)
def test_a_suppression_takes_a_finding_of_its_code_away(tmp_path: Path, overlay: str) -> None:
    # given a spec with one ambiguous scalar and a suppression, when it is checked
    loaded = load(small_spec(tmp_path, overlay))
    # then the finding is among the suppressed, with the reason
    assert "ambiguous-scalar" not in codes(loaded)
    [suppressed] = loaded.suppressed
    assert (suppressed.finding.code, suppressed.reason) == ("ambiguous-scalar", "a test")


@pytest.mark.parametrize(
    "overlay",
    [
        # below
        f"name: no\nseed: 1 # runspec: ignore[ambiguous-scalar] {WHY}",
        # next but one
        f"# runspec: ignore[ambiguous-scalar] {WHY}\nseed: 1\nname: no",
        # another code
        f"name: no # runspec: ignore[unknown-key] {WHY}",
        # another block
        f"data: {{sources: {{words: {{size: 2}}}}}} # runspec: ignore[ambiguous-scalar] {WHY}\n"
        "name: no",
    ],
)
def test_a_suppression_takes_nothing_else_away(tmp_path: Path, overlay: str) -> None:
    loaded = load(small_spec(tmp_path, overlay))
    assert sorted(codes(loaded)) == ["ambiguous-scalar", "unused-suppression"]
    assert loaded.suppressed == []


def test_rules_are_suppressed_in_the_layer_that_wrote_the_value(tmp_path: Path) -> None:
    # given a base that says why its value is right, and a spec that says another
    path = small_spec(tmp_path, "name: other")
    base = tmp_path / "base.yaml"
    base.write_text(
        base.read_text().replace(
            "seed: 1", f"broadcast: {{keep_versions: 3}} # runspec: ignore[versions-kept] {WHY}"
        )
        + "seed: 1\n"
    )
    # when the value is the base's, then nothing is found
    assert codes(load(path)) == []
    # when the spec writes it, then the base's suppression is not about it
    write(path, "extends: [base.yaml]\nbroadcast: {keep_versions: 3}")
    assert codes(load(path)) == ["versions-kept"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("seed: -1 # runspec: ignore[bad-value]", "bad-value"),
        ('steps: "3" # runspec: ignore[wrong-type]', "wrong-type"),
        ("optimizer: {lr: null} # runspec: ignore[missing-key]", "missing-key"),
        ("steps: ${NOT_SET} # runspec: ignore[variable]", "variable"),
        ("extends: [gone.yaml] # runspec: ignore[extends]", "extends"),
        ("verify: {lease_timeout: 3} # runspec: ignore[unit]", "unit"),
        ("algorithm: {filters: {zero_variance: on}} # runspec: ignore[ambiguous-scalar]",
         "ambiguous-scalar"),
    ],
)  # fmt: skip
def test_what_keeps_a_spec_from_being_made_cannot_be_suppressed(
    tmp_path: Path, line: str, code: str
) -> None:
    path = small_spec(tmp_path)
    head = "" if code == "extends" else "extends: [base.yaml]\n"
    path.write_text(f"{head}{line} {WHY}\n")
    loaded = load(path)
    assert (codes(loaded), loaded.suppressed) == ([code], [])


def test_a_secret_used_as_a_value_cannot_be_suppressed(tmp_path: Path) -> None:
    overlay = (
        "secrets: [{name: t, from: {env: T}}]\n"
        f'name: "${{T}}" # runspec: ignore[secret-value] {WHY}\n'
    )
    assert codes(load(small_spec(tmp_path, overlay), T="x"))[:1] == ["secret-value"]


@pytest.mark.parametrize(
    ("comment", "code", "hint"),
    [
        ("# runspec: ignore[ambiguous-scalar]", "suppression-reason", 'add reason="..."'),
        ('# runspec: ignore[ambiguous-scalar] reason=" "', "suppression-reason", "add reason"),
        (f"# runspec: ignore[ambiguous-scaler] {WHY}", "unknown-rule",
         "did you mean ambiguous-scalar?"),
        (f"# runspec: ignore[qqqqqq] {WHY}", "unknown-rule", "`runspec explain --list`"),
        ("# runspec: ignore", "malformed-suppression", "runspec: ignore[CODE]"),
        (f"# runspec: ignore[] {WHY}", "malformed-suppression", "runspec: ignore[CODE]"),
        (f"# runspec: ignore[ambiguous-scalar] because {WHY}", "malformed-suppression", "ignore["),
        ("# runspec: mind the name", "malformed-suppression", "runspec: ignore[CODE]"),
    ],
)  # fmt: skip
def test_a_suppression_that_is_none_is_found_and_counts_for_nothing(
    tmp_path: Path, comment: str, code: str, hint: str
) -> None:
    loaded = load(small_spec(tmp_path, f"name: no {comment}"))
    [faulty] = [finding for finding in loaded.findings if finding.code != "ambiguous-scalar"]
    assert (faulty.code, faulty.line) == (code, 2)
    assert hint in faulty.suggestion
    assert loaded.suppressed == []


def test_of_several_codes_those_of_no_use_are_named(tmp_path: Path) -> None:
    # given a suppression of two codes, one of which is found
    overlay = f"name: no # runspec: ignore[ambiguous-scalar, versions-kept] {WHY}"
    [finding] = load(small_spec(tmp_path, overlay)).findings
    # then the other is named, and the edit leaves the first alone
    assert finding.code == "unused-suppression"
    assert "versions-kept" in finding.message
    assert finding.fix is not None
    assert finding.fix.text == "ambiguous-scalar"


def test_in_a_lower_layer_a_suppression_may_serve_another_spec(tmp_path: Path) -> None:
    # given a suppression that the spec alone needs
    overlay = f"name: no # runspec: ignore[ambiguous-scalar] {WHY}"
    path = small_spec(tmp_path, overlay)
    above = write(tmp_path / "above.yaml", "extends: [spec.yaml]\nname: above")
    write(tmp_path / "profiles/small.yaml", "name: small")
    # when something lies over it and it is of no use there, then nobody minds
    assert codes(load(above)) == []
    assert codes(load(path, profile="small")) == []
    assert codes(load(path, "name=set")) == []
    # but a profile's own is the topmost
    write(tmp_path / "profiles/small.yaml", f"name: s # runspec: ignore[ambiguous-scalar] {WHY}")
    assert codes(load(path, profile="small")) == ["unused-suppression"]


def test_of_specs_linted_together_none_may_need_it(tmp_path: Path) -> None:
    # given a base whose suppression only its extension needs
    base = tmp_path / "spec.yaml"
    small_spec(tmp_path, f"broadcast: {{keep_versions: 4}} # runspec: ignore[versions-kept] {WHY}")
    above = write(tmp_path / "above.yaml", "extends: [spec.yaml]\nalgorithm: {async_level: 3}")
    # when the base is linted alone it is unused, with the extension it is used
    alone, both = check_files([SpecFiles(base)]), check_files([SpecFiles(base), SpecFiles(above)])
    assert [f.code for f in alone.findings] == ["unused-suppression"]
    assert both.findings == []
    assert [one.finding.code for one in both.suppressed] == ["versions-kept"]


def test_one_above_everything_is_about_the_file_as_a_whole(tmp_path: Path) -> None:
    # given a finding of something that is nowhere in the file, which is shown at its first line
    path = small_spec(tmp_path)
    base = (tmp_path / "base.yaml").read_text()
    write(path, f"# first\n\n{base}".replace("hf: ./model, ", ""))
    [finding] = [f for f in load(path).findings if f.code == "one-model"]
    # when the line of its block has a suppression above, then it is suppressed
    text = path.read_text().replace("model: {", f"# runspec: ignore[one-model] {WHY}\nmodel: {{")
    write(path, text)
    assert finding.severity == "error"
    assert "one-model" not in codes(load(path))
