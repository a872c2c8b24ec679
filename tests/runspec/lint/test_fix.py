"""`--fix`: parts of lines change, all else stays to the byte, and so does a doubtful file."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.spec.load import SpecFiles
from runspec.lint.check import CheckedFiles, check_files
from runspec.lint.fix import fix_texts, write_fixed
from tests.runspec.core.spec.spec_files import small_spec


def checked(path: Path) -> CheckedFiles:
    return check_files([SpecFiles(path)])


def mended_text(path: Path) -> str:
    found = checked(path)
    return fix_texts(found.findings, found.texts).texts[str(path)]


def test_edits_change_their_characters_and_nothing_else(tmp_path: Path) -> None:
    # given a file with comments, odd spacing, quotes and four things to mend
    overlay = (
        "# top\nname:   no   # a name\n\nalgorithm: { 'grop_size' :  \"8\", # how many\n"
        "   filters: {zero_variance: yes} }\n# end"
    )
    path = small_spec(tmp_path, overlay)
    # when it is mended as far as one pass sees
    text = mended_text(path)
    # then only those characters have changed
    assert text == "extends: [base.yaml]\n" + overlay.replace("  no ", '  "no" ').replace(
        "grop_size", "group_size"
    ).replace("yes", "true")


def test_every_file_of_a_spec_is_mended(tmp_path: Path) -> None:
    # given a base and a spec with a misspelt key each
    path = small_spec(tmp_path, "stepss: 4")
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text().replace("seed: 1", "sead: 1"))
    found = checked(path)
    # when both are fixed, then both are right
    write_fixed(fix_texts(found.findings, found.texts), found.texts)
    assert checked(path).findings == []
    assert "seed: 1" in base.read_text()


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_byte_order_mark_mode_and_links_stay(
    tmp_path: Path, ends: str, mark: bytes
) -> None:
    # given a file of another system, with rights of its own, behind a link
    real = small_spec(tmp_path).rename(tmp_path / "real.yaml")
    lines = ["extends: [base.yaml]", "name: no", "# end", ""]
    real.write_bytes(mark + ends.join(lines).encode())
    real.chmod(0o640)
    path = tmp_path / "spec.yaml"
    path.symlink_to(real)
    # when it is mended
    found = checked(path)
    write_fixed(fix_texts(found.findings, found.texts), found.texts)
    # then nothing of that has changed
    assert real.read_bytes() == mark + ends.join(lines).replace("no", '"no"').encode()
    assert path.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_suppression_of_no_use_goes_with_its_line(tmp_path: Path) -> None:
    # given one alone on its line and one behind a value
    comment = '# runspec: ignore[versions-kept] reason="x"'
    path = small_spec(tmp_path, f"{comment}\nseed: 2\nsteps: 3   {comment}\nname: a")
    assert mended_text(path) == "extends: [base.yaml]\nseed: 2\nsteps: 3\nname: a"


def test_a_file_in_which_two_edits_meet_stays(tmp_path: Path) -> None:
    # given one value that two keys share, who each want it written in another way
    overlay = "algorithm: {filters: {zero_variance: &a on}}\nname: *a\nseed: 2"
    found = checked(small_spec(tmp_path, overlay))
    fixed = fix_texts(found.findings, found.texts)
    assert fixed.texts == {}
    assert "two edits of line 2" in fixed.refused[str(tmp_path / "spec.yaml")]


def test_a_file_that_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = small_spec(tmp_path, "name: no")
    found = checked(path)
    path.write_text("name: other\n")
    with pytest.raises(UserError, match="changed while"):
        write_fixed(fix_texts(found.findings, found.texts), found.texts)
    assert path.read_text() == "name: other\n"
