"""Which lines each `# runspec:` comment is about, and what only looks like a comment."""

from __future__ import annotations

import pytest

from runspec.core.spec.yaml_nodes import parse_yaml


def found(text: str) -> list[tuple[int, int, int]]:
    """(line of the comment, first and last line that it is about) of each."""
    return [(c.place.line, c.first, c.last) for c in parse_yaml(text, "f.yaml").comments]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x: 1\na: 1 # runspec: x\nb: 2\n", [(2, 2, 2)]),  # behind a value
        ("x: 1\n#runspec: x\na: 1\nb: 2\n", [(2, 3, 3)]),  # above a value
        ("x: 1\n# runspec: x\n\n# more\na: 1\n", [(2, 5, 5)]),  # above blanks and comments
        ("x: 1\na: # runspec: x\n  b:\n    - c\n  d: 2\ne: 3\n", [(2, 2, 5)]),  # behind a block
        # above a block, to its last line that says something
        ("x: 1\n# runspec: x\na:\n  b: 1\n\n  c: 2\n# other\nd: 3\n", [(2, 3, 6)]),
        ("x: 1\na:\n- b: 1 # runspec: x\n  c: 2\n- d: 3\n", [(3, 3, 4)]),  # an item of a list
        # behind a map in braces that goes on
        ("x: 1\na: {b: 1, # runspec: x\n    c: [2,\n    3]}\nd: 1\n", [(2, 2, 4)]),
        # inside a map in braces
        ("x: 1\na: {b: 1,\n    c: 2, # runspec: x\n    d: 3}\n", [(3, 3, 3)]),
        ("x: 1\na: | # runspec: x\n  text\n\n  more\nb: 1\n", [(2, 2, 5)]),  # a block scalar
        ("x: 1\na: one\n  two # runspec: x\n", [(3, 3, 3)]),  # the end of a scalar
        ("# runspec: x\na: 1\n", [(1, 1, 2)]),  # above everything: the file too
        ("---\n# runspec: x\na: 1\n", [(2, 1, 3)]),  # below the document's start
        ("x: 1\n# runspec: x", [(2, 3, 0)]),  # about nothing
        ("x: 1\r\na: 1 # runspec: x\r\nb: 2\r\n", [(2, 2, 2)]),  # lines as Windows ends them
    ],
)  # fmt: skip
def test_a_comment_is_about_what_begins_in_its_line_or_the_next(
    text: str, expected: list[tuple[int, int, int]]
) -> None:
    # given a file, when its comments are looked for, then they are about these lines
    assert found(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        'a: "x # runspec: x"',
        "a: 'x\n  # runspec: x'",
        "a: x#runspec:x",
        "a: |\n  # runspec: x\n",
        "a: >-\n  text # runspec: x\n",
        '"# runspec: x": 1',
        "a: 1 # see runspec: x",
        "a: [1 # runspec: x",
    ],
)
def test_text_in_scalars_and_broken_files_holds_no_comment(text: str) -> None:
    assert found(text) == []
