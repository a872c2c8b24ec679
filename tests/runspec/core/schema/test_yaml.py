"""YAML 1.2: values, exact places, comments, what 1.1 reads otherwise, and text that reads back."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runspec.core.schema.fields import DURATION, RATE, SIZE
from runspec.core.schema.validate import to_python
from runspec.core.schema.yaml_nodes import (
    MAX_CHARACTERS,
    MAX_NODES,
    MapNode,
    parse_yaml,
    resolve_scalar,
)
from runspec.core.schema.yaml_text import other_reading, to_yaml
from tests.runspec.core.schema.spec_files import load, small_spec

KEY = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
# Control characters are broken YAML wherever they stand in JSON's form.
PLAIN_TEXT = st.text(
    st.characters(exclude_categories=("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")), max_size=8
)
NUMBERS = st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False)


SCALAR = st.none() | st.booleans() | NUMBERS
DATA = st.recursive(
    SCALAR | TEXT | st.lists(SCALAR | TEXT, max_size=3),
    lambda inner: (
        st.dictionaries(KEY, inner, max_size=3)
        | st.lists(st.dictionaries(KEY, inner, min_size=1, max_size=3), max_size=3)
    ),
    max_leaves=8,
)
JSON = st.recursive(
    SCALAR | PLAIN_TEXT,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(PLAIN_TEXT.filter(bool), inner, max_size=4)
    ),
    max_leaves=10,
)


def read(text: str) -> Any:
    document = parse_yaml(text, "f.yaml")
    assert document.root is not None and not document.findings, document.findings
    return to_python(document.root)


def test_plain_scalars_follow_the_core_schema():
    for texts, wanted in (
        ("1e-6 3E7 1. .5 -0.25e+2 .inf -.INF", [1e-6, 3e7, 1.0, 0.5, -25.0, math.inf, -math.inf]),
        ("010 -07 0o10 0x1F +12 null ~ true False", [10, -7, 8, 31, 12, None, None, True, False]),
        (text := "on yes nUll 1_000 0b11 12:30:45 2024-01-01 1e =", text.split()),
    ):
        found = [resolve_scalar(each) for each in texts.split()]
        assert (found, list(map(type, found))) == (wanted, list(map(type, wanted)))
    assert resolve_scalar("") is None


def test_every_node_knows_where_it_was_written():
    root = parse_yaml("a: 1\nb:\n  - {c: x,  dd: yy}\n", "f.yaml").root
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
        ('a: "b\nc: "d"\n', 1, 4, 'the " that opens here is not closed before line 2'),
        ("a: b: c", 1, 5, "put text with a colon in quotes"),
        ("a:\n\tb: 1\n", 2, 1, "YAML takes no tabs"),
        ("a:\n   b: 1\n  c: 2\n", 3, 3, "indent the keys of a map alike"),
        ('{"a": 1}\n{"a": 2}\n', 2, 1, "this looks like a file of rows"),
        ("a: 1\n--- \nb: 2", 2, 1, "a second document"),
        ("x: 1\na: !!python/object:os.system 1", 2, 4, "tag"),
        ("? [1, 2]\n: 3", 1, 3, "a key must be a word"),
        ("a: *nobody", 1, 4, "alias *nobody"),
        ("a: '\ttab\x07'", 1, 1, "broken YAML"),
        ('a: "\\ud800"', 1, 4, "no text"),
        ("a: " + "9" * 100, 1, 4, "a number of 100 characters"),
        ("a: " + "[" * 5000, 1, 36, "nested deeper"),
    ],
)
def test_what_a_spec_has_no_use_for_is_one_finding(text, line, column, message):
    document = parse_yaml(text, "f")
    [finding] = document.findings
    assert (document.root, finding.line, finding.column) == (None, line, column)
    assert message in f"{finding.message} ({finding.suggestion})"


def test_aliases_share_values_but_cannot_blow_up():
    assert read("a: &t [1, 2]\nb: *t\n") == {"a": [1, 2], "b": [1, 2]}
    # given ten levels of ten aliases each, 10^10 nodes when expanded, then it stops at the bound
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 11):
        levels.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")
    [finding] = parse_yaml("\n".join(levels), "f").findings
    assert f"more than {MAX_NODES} nodes" in finding.message
    # and a document too long is not parsed
    [finding] = parse_yaml("a" * (MAX_CHARACTERS + 1), "f").findings
    assert "longer than" in finding.message


def test_a_key_twice_is_found_beside_everything_else():
    document = parse_yaml("a: 1\nb: 2\na: 3\nb: 4\n", "f")
    assert document.root is not None
    assert to_python(document.root) == {"a": 1, "b": 2}
    assert [(f.code, f.line, f.column) for f in document.findings] == [
        ("duplicate-key", 3, 1),
        ("duplicate-key", 4, 1),
    ]


@settings(derandomize=True, max_examples=60)
@given(JSON)
def test_json_reads_as_itself(value):
    # JSON is a subset of YAML 1.2.
    assert read(json.dumps(value, ensure_ascii=False)) == value


@settings(derandomize=True, max_examples=60)
@given(st.dictionaries(KEY, DATA, min_size=1, max_size=4))
def test_any_data_reads_back_the_same(data):
    assert read(to_yaml(data)) == data


def test_a_comment_cannot_end_its_line():
    breaks = "a\nb\rc\x85d\u2028e"
    assert read(to_yaml({"key": 1}, lambda at: breaks)) == {"key": 1}


@pytest.mark.parametrize("quantity", [DURATION, SIZE, RATE], ids=lambda quantity: quantity.kind)
@settings(derandomize=True, max_examples=60)
@given(st.data())
def test_amounts_read_back_exactly(quantity, data):
    unit = data.draw(st.sampled_from(sorted(quantity.units)))
    number = data.draw(st.from_regex(r"[1-9][0-9]{0,11}(\.[0-9]{1,12})?", fullmatch=True))
    amount = quantity.parse(f"{number}{unit}")
    assert quantity.parse(quantity.format(amount)) == amount


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        # line of the comment, first and last line that it is about
        ("x: 1\na: 1 # runspec: x\nb: 2\n", (2, 2, 2)),  # behind a value
        ("x: 1\n#runspec: x\na: 1\nb: 2\n", (2, 3, 3)),  # above a value
        ("x: 1\na: # runspec: x\n  b:\n    - c\n  d: 2\ne: 3\n", (2, 2, 5)),  # behind a block
        # above blanks, comments and a block, to its last line that says something
        ("x: 1\n# runspec: x\n\n# more\na:\n  b: 1\n\n  c: 2\n# other\nd: 3\n", (2, 5, 8)),
        ("x: 1\na:\n- b: 1 # runspec: x\n  c: 2\n- d: 3\n", (3, 3, 4)),  # an item of a list
        # behind a map in braces that goes on, and inside one
        ("x: 1\na: {b: 1, # runspec: x\n    c: [2,\n    3]}\nd: 1\n", (2, 2, 4)),
        ("x: 1\na: | # runspec: x\n  text\n\n  more\nb: 1\n", (2, 2, 5)),  # a block scalar
        ("x: 1\na: one\n  two # runspec: x\n", (3, 3, 3)),  # the end of a scalar
        ("# runspec: x\na: 1\n", (1, 1, 2)),  # above everything: the file too
        ("---\n# runspec: x\na: 1\n", (2, 1, 3)),  # below the document's start
        ("x: 1\n# runspec: x", (2, 3, 0)),  # about nothing
        ("x: 1\r\na: 1 # runspec: x\r\nb: 2\r\n", (2, 2, 2)),  # lines as Windows ends them
        # text in scalars and broken files hold none
        *((text, None) for text in ('a: "x # runspec: x"', "a: 'x\n  # runspec: x'")),
        *((text, None) for text in ("a: x#runspec:x", '"# runspec: x": 1', "a: [1 # runspec: x")),
        *((text, None) for text in ("a: |\n  # runspec: x\n", "a: 1 # see runspec: x")),
    ],
)
def test_a_comment_is_about_what_begins_in_its_line_or_the_next(text, lines):
    found = [(c.place.line, c.first, c.last) for c in parse_yaml(text, "f.yaml").comments]
    assert found == ([lines] if lines else [])


@pytest.mark.parametrize(
    ("texts", "readings"),
    [
        ("on Yes y OFF no N", [True] * 3 + [False] * 3),
        ("010 -017 0b11 1_000 0xF_F 12:30 -1:30:00", [8, -15, 3, 1000, 255, 750, -5400]),
        ("1_000.5 1:30.5", [1000.5, 90.5]),
        ("08 2026-01-31 2026-01-31T10:00:00Z", ["the text '08'", "a date", "a date"]),
    ],
)
def test_what_yaml_1_1_reads(texts, readings):
    found = [other_reading(text) for text in texts.split()]
    assert (found, list(map(type, found))) == (readings, list(map(type, readings)))


PARAM = "data.sources.words.params.a"
VARIANCE = "algorithm.filters.zero_variance"


@pytest.mark.parametrize(
    ("overlay", "severity", "path", "fixed"),
    [
        # text where text belongs: quotes keep it
        ("name: no", "warning", "name", '"no"'),
        ("model: {hf: 2026-01-31}", "warning", "model.hf", '"2026-01-31"'),
        # a free map takes any type: what was read is written so that everything reads it
        ("data: {sources: {words: {params: {a: on}}}}", "warning", PARAM, '"on"'),
        ("data: {sources: {words: {params: {a: 010}}}}", "warning", PARAM, "10"),
        # the wrong type here, the right one by YAML 1.1
        ("algorithm: {filters: {zero_variance: yes}}", "error", VARIANCE, "true"),
        ("steps: 1_000", "error", "steps", "1000"),
        ("steps: 12:30", "error", "steps", None),
        ("model: {revision: 010}", "error", "model.revision", '"010"'),
    ],
)
def test_ambiguous_scalars_are_found_with_what_to_write(tmp_path, overlay, severity, path, fixed):
    # given a spec with such a scalar, when it is checked
    found = load(small_spec(tmp_path, overlay)).findings
    # then the scalar is the only finding, with an edit of just its characters
    [finding] = [f for f in found if f.code == "ambiguous-scalar"]
    assert (finding.severity, finding.path) == (severity, path)
    assert (finding.fix.text if finding.fix else None) == fixed
    if finding.fix is not None:
        written = finding.place.source[finding.fix.start - 1 : finding.fix.end - 1]
        assert written == overlay.rpartition(": ")[2].rstrip("}")


@pytest.mark.parametrize(
    ("overlay", "text"),
    [
        # numbers of numeric fields and quoted text are no finding
        *((number, None) for number in ("seed: 010", "optimizer: {lr: 1e-6}", "name: 'no'")),
        ("reward: [{name: length, targets: [007, 010]}]", None),
        # a value of the right characters is mended by quotes, or without
        ('steps: "100"', "100"),
        ("algorithm: {filters: {zero_variance: 'true'}}", "true"),
        ("model: {revision: 1234567}", '"1234567"'),
    ],
)
def test_only_a_wrong_type_is_mended(tmp_path, overlay, text):
    found = load(small_spec(tmp_path, overlay)).findings
    codes = ("ambiguous-scalar", "wrong-type")
    wrong = [(f.code, f.fix and f.fix.text) for f in found if f.code in codes]
    assert wrong == ([] if text is None else [("wrong-type", text)])
