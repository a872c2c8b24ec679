"""YAML text that reads back the same, by our reader and by PyYAML's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runspec.core.spec.fields import DURATION, RATE, SIZE, Quantity
from runspec.core.spec.validate import to_python
from runspec.core.spec.yaml_nodes import parse_yaml
from runspec.core.spec.yaml_text import to_yaml

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
KEY = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
SCALAR = (
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
VALUE = st.recursive(
    SCALAR | st.lists(SCALAR, max_size=3),
    lambda inner: (
        st.dictionaries(KEY, inner, max_size=3)
        | st.lists(st.dictionaries(KEY, inner, min_size=1, max_size=3), max_size=3)
    ),
    max_leaves=8,
)


def read(text: str) -> Any:
    document = parse_yaml(text, "x.yaml")
    assert document.root is not None and not document.findings, document.findings
    return to_python(document.root)


@settings(max_examples=60)
@given(st.dictionaries(KEY, VALUE, min_size=1, max_size=4))
def test_any_data_reads_back_the_same(data: dict[str, Any]) -> None:
    assert read(to_yaml(data)) == data


def test_a_comment_cannot_end_its_line() -> None:
    # given a comment with every kind of break
    breaks = "a\nb\rc\x85d\u2028e"
    # then the document has the one key that it should have
    assert read(to_yaml({"key": 1}, lambda at: breaks)) == {"key": 1}


@pytest.mark.parametrize("quantity", [DURATION, SIZE, RATE], ids=lambda quantity: quantity.kind)
@settings(max_examples=60)
@given(st.data())
def test_amounts_read_back_exactly(quantity: Quantity, data: Any) -> None:
    unit = data.draw(st.sampled_from(sorted(quantity.units)))
    number = data.draw(st.from_regex(r"[1-9][0-9]{0,11}(\.[0-9]{1,12})?", fullmatch=True))
    amount = quantity.parse(f"{number}{unit}")
    assert quantity.parse(quantity.format(amount)) == amount
