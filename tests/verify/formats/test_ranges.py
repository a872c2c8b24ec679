"""The manifest of a range of rows: what is believed, and what is not."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, sign_document
from tests.verify.coordinator.deployment import tiny_spec
from tests.verify.coordinator.documents import ROWS, documents_spec
from verify.formats.batch import KIND as BATCH_KIND
from verify.formats.ranges import (
    KIND,
    RangeManifest,
    RowRange,
    open_ranges,
    rows_per_step,
    sign_ranges,
)

KEY = SigningKey.generate()
MANIFEST = RangeManifest("tiny", 3, RowRange(18, 24), 7, "ab" * 32)


def opened(data: bytes, *, step: int = 3, signer: SigningKey | None = KEY) -> RangeManifest:
    keys = None if signer is None else frozenset({signer.public_hex})
    return open_ranges(data, coordinators=keys, run="tiny", step=step, rows_per_step=ROWS)


def test_the_rows_of_a_step_follow_from_the_spec() -> None:
    assert rows_per_step(documents_spec()) == ROWS
    assert rows_per_step(tiny_spec()) == 0
    found = [RowRange.of_step(step, ROWS) for step in range(3)]
    assert found == [RowRange(0, 6), RowRange(6, 12), RowRange(12, 18)]


def test_a_signed_manifest_is_read_as_it_was_written() -> None:
    data = sign_ranges(MANIFEST, KEY)
    assert opened(data) == opened(data, signer=None) == MANIFEST


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": "other"}, "of other step 3, not tiny step 3"),
        ({"step": 4, "rows": RowRange(24, 30)}, "of tiny step 4, not tiny step 3"),
        ({"rows": RowRange(18, 23)}, "rows 18 to 23 in step 3, which has 18 to 24"),
        ({"rows": RowRange(17, 23)}, "rows 17 to 23 in step 3"),
        ({"rows": RowRange(24, 18)}, "rows 24 to 18 in step 3"),
        ({"rows": RowRange(-6, 0)}, "rows.first"),
        ({"ledger_rows": 0}, "ledger_rows"),
        ({"ledger_chain": "x"}, "ledger_chain"),
    ],
)
def test_other_manifests_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSignature, match=words):
        opened(sign_ranges(replace(MANIFEST, **changes), KEY))


def test_signatures_of_others_and_of_other_documents_are_refused() -> None:
    with pytest.raises(BadSignature):
        opened(sign_ranges(MANIFEST, SigningKey.generate()))
    with pytest.raises(BadSignature):
        opened(sign_document(BATCH_KIND, asdict(MANIFEST), KEY))
    with pytest.raises(BadSignature):
        opened(sign_document(KIND, {**asdict(MANIFEST), "more": 1}, KEY))
