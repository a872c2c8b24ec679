"""`--select` and `--ignore`: codes and groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.spec.load import SpecFiles
from runspec.lint.check import check_files, selection
from runspec.lint.registry import RULES
from tests.runspec.core.spec.spec_files import small_spec


def test_all_rules_are_selected_unless_some_are_named() -> None:
    of_file = {code for code, rule in RULES.items() if rule.group == "file"}
    assert selection([], []) == set(RULES)
    assert selection(["file"], []) == of_file
    assert selection(["versions-kept,unknown-key", "yaml"], []) == {
        "versions-kept",
        "unknown-key",
        "yaml",
    }
    assert selection([], ["file"]) == set(RULES) - of_file
    assert selection(["file"], ["unknown-key"]) == of_file - {"unknown-key"}


@pytest.mark.parametrize("words", [["verisons-kept"], ["unknown-key, "], [""], ["*"]])
def test_a_word_that_is_neither_is_bad_usage(words: list[str]) -> None:
    for select, ignore in ((words, []), ([], words)):
        with pytest.raises(UserError, match="no rule or group"):
            selection(select, ignore)


def test_what_leaves_no_spec_is_always_shown(tmp_path: Path) -> None:
    # given a spec of which no rule can be asked, when only others are selected
    checked = check_files([SpecFiles(small_spec(tmp_path, "seed: -1"))])
    # then it is shown none the less
    assert len(checked.only({"versions-kept"}).findings) == 1
