"""YAML 1.2 scalars, exact places, and bounds on what a hostile document may cost."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runspec.core.spec.validate import to_python
from runspec.core.spec.yaml_nodes import (
    MAX_CHARACTERS,
    MAX_NODES,
    MapNode,
    parse_yaml,
    resolve_scalar,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("3E7", 3e7),
        ("1.", 1.0),
        (".5", 0.5),
        ("-0.25e+2", -25.0),
        ("010", 10),
        ("-07", -7),
        ("0o10", 8),
        ("0x1F", 31),
        ("+12", 12),
        ("~", None),
        ("null", None),
        ("NULL", None),
        ("", None),
        ("true", True),
        ("False", False),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("on", "on"),
        ("yes", "yes"),
        ("nUll", "nUll"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
        ("=", "="),
    ],
)
def test_plain_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    resolved = resolve_scalar(text)
    assert resolved == value
    assert type(resolved) is type(value)


def test_every_node_knows_where_it_was_written() -> None:
    document = parse_yaml("a: 1\nb:\n  - {c: x,  dd: yy}\n", "f.yaml")
    root = document.root
    assert isinstance(root, MapNode)
    inner = root.entries["b"].value.items[0].entries["dd"]  # type: ignore[union-attr]
    assert (inner.key_place.line, inner.key_place.column) == (3, 13)
    assert (inner.value.place.line, inner.value.place.column) == (3, 17)
    assert inner.value.place.source == "  - {c: x,  dd: yy}"


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("a: [1", 1, 4, "the [ that opens here is not closed before the end"),
        ("a: {b: 1\nc: 2\n", 1, 4, "the { that opens here is not closed before line 2"),
        ("a:\n  - {b: 1\n  - {c: 2}\n", 2, 5, "the { that opens here is not closed before line 3"),
        ('a: "b\nc: "d"\n', 1, 4, 'the " that opens here is not closed before line 2'),
        ("a: 'b\nc: 1\n", 1, 4, "the ' that opens here is not closed before the end"),
        ("a: [1, 2}\nb: 1\n", 1, 9, "expected ',' or ']'"),
        ("a: [1 {2}]", 1, 7, "expected ',' or ']'"),
        ("a: b: c", 1, 5, "mapping values are not allowed"),
        ("a: 1\n--- \nb: 2", 2, 1, "a second document"),
        ("x: 1\na: !!python/object:os.system 1", 2, 4, "tag"),
        ("a: ! 1", 1, 4, "tag"),
        ("? [1, 2]\n: 3", 1, 3, "a key must be a word"),
        ("a: *nobody", 1, 4, "alias *nobody"),
        ("a: &x [*x]", 1, 8, "alias *x"),
        ("a: '\ttab\x07'", 1, 1, "broken YAML"),
        ('a: "\\Uffffffff"', 1, 1, "broken YAML"),
        ('a: "\\ud800"', 1, 4, "no text"),
        ("a: " + "9" * 100, 1, 4, "a number of 100 characters"),
        ("a: " + "[" * 40, 1, 36, "nested deeper"),
        ("a: " + "[" * 5000, 1, 36, "nested deeper"),
    ],
)
def test_what_a_spec_has_no_use_for_is_one_finding(
    text: str, line: int, column: int, message: str
) -> None:
    document = parse_yaml(text, "f")
    assert document.root is None
    [finding] = document.findings
    assert (finding.line, finding.column) == (line, column)
    assert message in finding.message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a:\n\tb: 1\n", "YAML takes no tabs"),
        ("a:\n   b: 1\n  c: 2\n", "indent the keys of a map alike"),
        ("a: b: c\n", "put text with a colon in quotes"),
        ('{"a": 1}\n{"a": 2}\n', "this looks like a file of rows"),
    ],
)
def test_common_slips_of_yaml_come_with_what_to_do(text: str, hint: str) -> None:
    [finding] = parse_yaml(text, "f").findings
    assert hint in finding.suggestion


def test_aliases_share_values_but_cannot_blow_up() -> None:
    # Given ten levels of ten aliases each, 10^10 nodes when expanded
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 11):
        levels.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")

    # When it is read, then it stops at the bound
    [finding] = parse_yaml("\n".join(levels), "f").findings
    assert f"more than {MAX_NODES} nodes" in finding.message

    # And a modest alias is a plain value
    modest = parse_yaml("a: &t [1, 2]\nb: *t\n", "f").root
    assert modest is not None
    assert to_python(modest) == {"a": [1, 2], "b": [1, 2]}


def test_a_key_twice_is_found_beside_everything_else() -> None:
    document = parse_yaml("a: 1\nb: 2\na: 3\nb: 4\n", "f")
    assert document.root is not None
    assert to_python(document.root) == {"a": 1, "b": 2}
    assert [(f.code, f.line, f.column) for f in document.findings] == [
        ("duplicate-key", 3, 1),
        ("duplicate-key", 4, 1),
    ]


def test_a_document_too_long_is_not_parsed() -> None:
    [finding] = parse_yaml("a" * (MAX_CHARACTERS + 1), "f").findings
    assert "longer than" in finding.message


# Control characters are broken YAML wherever they stand.
TEXT = st.characters(exclude_categories=("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"))


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**60), 2**60)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(TEXT, max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text(TEXT, min_size=1, max_size=4), inner, max_size=4)
        ),
        max_leaves=20,
    )
)
def test_json_reads_as_itself(value: Any) -> None:
    # JSON is a subset of YAML 1.2.
    document = parse_yaml(json.dumps(value, ensure_ascii=False), "f")
    assert document.findings == []
    assert document.root is not None
    assert to_python(document.root) == value
