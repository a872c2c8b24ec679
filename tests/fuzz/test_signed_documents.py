"""Whatever is signed or sent as a document: `BadSignature`, or fields of the right form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.bounds import costly
from tests.fuzz.documents import KINDS, ODD, Kind
from tests.fuzz.json_values import changed, damaged, values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BY_WORKERS = ["submission", "verdict", "lease"]
"""Made or brought back by those who are not trusted; of the others `test_lanes` has fewer cases."""
anything = values(ODD)


@costly
@pytest.mark.parametrize("kind", [k for k in KINDS if k.name in BY_WORKERS], ids=lambda k: k.name)
@given(data=st.data())
def test_signed_payloads(kind: Kind, data: st.DataObject) -> None:
    kind.check(data.draw(changed([kind.payload], anything)))


@costly
@given(case=damaged([kind.signed(kind.payload) for kind in KINDS]))
def test_damaged_bytes(case: tuple[bytes, bytes]) -> None:
    data, original = case
    for kind in KINDS:
        if kind.check_damaged(data):
            assert kind.check_damaged(original)


@costly
@given(data=st.binary(max_size=300))
def test_documents_of_any_bytes(data: bytes) -> None:
    for kind in KINDS:
        assert kind.opened(data) is None
