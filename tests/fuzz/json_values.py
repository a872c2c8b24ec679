"""JSON from outside: values of every kind, valid objects with changes, bytes with damage."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
pieces = st.sampled_from(
    [b"", b'"', b"{", b"]" * 40, b"[" * 40, b"\\u0061", b" ", b",", b"9" * 99, b"1.0", b"true"]
)


def values(leaves: Sequence[Any], whole: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """Values of every kind.

    Args:
        leaves: scalars that the format is sensitive to.
        whole: parts of valid documents, to be found where they do not belong.
    """
    scalars = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.integers(-2, 40)
        | st.floats(allow_nan=False, allow_infinity=False)
        | text
        | st.sampled_from([10**30, -(2**63), 2**31, 1e300, *leaves])
    )
    return st.recursive(
        scalars | st.sampled_from(whole) if whole else scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
        max_leaves=8,
    )


def containers(node: Any) -> list[Any]:
    """Every object and list in a JSON value that has something in it."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return ([node] if inner else []) + [found for child in inner for found in containers(child)]


@st.composite
def changed(
    draw: st.DrawFn, valid: Sequence[dict[str, Any]], anything: st.SearchStrategy[Any]
) -> dict[str, Any]:
    """A valid object, changed in up to four places: replaced, removed, added, doubled, nested."""
    payload: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(0, 4))):
        found = containers(payload)
        if not found:
            break
        node = draw(st.sampled_from(found))
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        match draw(st.sampled_from(["replace", "remove", "add", "double", "nest"])):
            case "replace":
                node[key] = copy.deepcopy(draw(anything))
            case "remove":
                del node[key]
            case "add" if isinstance(node, dict):
                node[draw(text)] = copy.deepcopy(draw(anything))
            case "double" if isinstance(node, list):
                node.append(copy.deepcopy(node[key]))
            case _:
                for _ in range(draw(st.integers(1, 40))):
                    node[key] = [node[key]]
    return payload


@st.composite
def damaged(draw: st.DrawFn, originals: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Bytes with changes, and what they were."""
    original = draw(st.sampled_from(originals))
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 30)))
        piece = draw(st.binary(max_size=8) | pieces | st.just(bytes(data[start:end]) * 2))
        data[start:end] = piece
    return bytes(data), original
