"""Documents of learner islands: what is believed, and what is not."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from runspec.core.canonical import parse_object
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, sign_document
from tests.verify.coordinator.island_run import NAMES, offer
from verify.formats.batch import BatchGroup, BatchManifest, open_batch, sign_batch
from verify.formats.islands import (
    COMMIT_KIND,
    OFFER_KIND,
    CommitRecord,
    Contribution,
    Dropped,
    IslandShare,
    divide,
    open_commit,
    open_offer,
    record_digest,
    sign_commit,
    sign_offer,
)
from verify.formats.ranges import RangeManifest, RowRange, open_ranges, sign_ranges

KEYS = {name: SigningKey.generate() for name in NAMES}
PUBLIC = {name: key.public_hex for name, key in KEYS.items()}
COORDINATOR = SigningKey.generate()
OFFER = offer("a", 3)
RECORD = CommitRecord(
    *("tiny", 3, OFFER.base, "float16"),
    *([Contribution.of(offer("a", 3)), Contribution.of(offer("c", 3))], [Dropped("b", "late")]),
    *("ab" * 32, 7, "cd" * 32),
)


def opened(data: bytes, *, step: int = 3) -> CommitRecord:
    keys = frozenset({COORDINATOR.public_hex})
    return open_commit(data, coordinators=keys, run="tiny", step=step)


# -- Shares of a step ------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "count"), [(6, 3), (7, 3), (1, 4), (0, 2), (1000, 7)])
def test_shares_divide_a_step_evenly_and_in_order(size: int, count: int) -> None:
    names = [str(i) for i in range(count)]
    shares = divide(10, 10 + size, names)
    assert [share.island for share in shares] == names
    assert [share.first for share in shares] == [10, *(share.last for share in shares[:-1])]
    assert shares[-1].last == 10 + size
    sizes = [share.last - share.first for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_share_of_whole_rows_is_the_formula_of_the_spec() -> None:
    assert divide(12, 18, NAMES) == [
        *(IslandShare("a", 12, 14), IslandShare("b", 14, 16), IslandShare("c", 16, 18))
    ]
    assert divide(0, 6, []) == []


RANGES = RangeManifest("tiny", 3, RowRange(18, 24), 7, "ab" * 32, divide(18, 24, NAMES))
GROUPS = [BatchGroup("01" * 32, "02" * 32, group, 0, 0) for group in range(4)]
BATCH = BatchManifest("tiny", 3, GROUPS, True, {}, 7, "ab" * 32, divide(0, 4, NAMES))


def ranges_of(data: bytes) -> RangeManifest:
    return open_ranges(data, coordinators=None, run="tiny", step=3, rows_per_step=6)


def batch_of(data: bytes) -> BatchManifest:
    return open_batch(data, coordinators=None, run="tiny", step=3)


def test_manifests_name_the_shares() -> None:
    assert ranges_of(sign_ranges(RANGES, COORDINATOR)) == RANGES
    assert batch_of(sign_batch(BATCH, COORDINATOR)) == BATCH


def test_manifests_without_islands_have_no_field_for_them() -> None:
    # so what was signed before there were islands stays the same
    for data in (
        sign_ranges(replace(RANGES, shares=[]), COORDINATOR),
        sign_batch(replace(BATCH, shares=[]), COORDINATOR),
    ):
        assert "shares" not in parse_object(data, max_bytes=len(data))["payload"]
    assert ranges_of(sign_ranges(replace(RANGES, shares=[]), COORDINATOR)).shares == []


@pytest.mark.parametrize(
    "shares",
    [
        divide(18, 23, NAMES),
        divide(18, 24, NAMES)[:2],
        [IslandShare("a", 18, 20), IslandShare("b", 20, 23), IslandShare("c", 23, 24)],
        [IslandShare("a", 18, 21), IslandShare("b", 20, 24)],
        divide(18, 24, ["a", "a"]),
    ],
)
def test_shares_that_do_not_divide_a_step_are_refused(shares: list[IslandShare]) -> None:
    with pytest.raises(BadSignature, match=r"do not divide|named twice"):
        ranges_of(sign_ranges(replace(RANGES, shares=shares), COORDINATOR))
    with pytest.raises(BadSignature, match=r"do not divide|named twice"):
        batch_of(sign_batch(replace(BATCH, shares=shares), COORDINATOR))


# -- Offers ----------------------------------------------------------------------------------------


def test_an_offer_is_read_as_the_island_signed_it() -> None:
    assert open_offer(sign_offer(OFFER, KEYS["a"]), keys=PUBLIC, run="tiny") == OFFER
    bare = replace(OFFER, data="", weight=0.0)
    assert open_offer(sign_offer(bare, KEYS["a"]), keys=PUBLIC, run="tiny") == bare


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": "other"}, "of run other, not tiny"),
        ({"island": "b"}, "of island b, signed by another island"),
        ({"step": -1}, "step"),
        ({"base": "x"}, "base"),
        ({"data": "x"}, "data"),
        ({"url": "ftp://a"}, "url"),
        ({"url": "http://" + "a" * 400}, "url"),
        ({"bytes": 0}, "bytes"),
        ({"weight": -1.0}, "weight"),
        ({"norm": 1e302}, "norm"),
        ({"island": "../b"}, "island"),
    ],
)
def test_other_offers_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSignature, match=words):
        open_offer(sign_offer(replace(OFFER, **changes), KEYS["a"]), keys=PUBLIC, run="tiny")


def test_offers_of_strangers_and_other_documents_are_refused() -> None:
    with pytest.raises(BadSignature, match="may not sign"):
        open_offer(sign_offer(OFFER, SigningKey.generate()), keys=PUBLIC, run="tiny")
    with pytest.raises(BadSignature):
        data = sign_document(COMMIT_KIND, asdict(OFFER), KEYS["a"])
        open_offer(data, keys=PUBLIC, run="tiny")


# -- Records ---------------------------------------------------------------------------------------


def test_a_record_is_read_as_the_coordinator_signed_it() -> None:
    data = sign_commit(RECORD, COORDINATOR)
    assert opened(data) == RECORD
    first = replace(RECORD, previous=None, dropped=[])
    assert opened(sign_commit(first, COORDINATOR)) == first
    assert record_digest(data) != record_digest(sign_commit(first, COORDINATOR))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": "other"}, "of other step 3, not tiny step 3"),
        ({"step": 4}, "of tiny step 4, not tiny step 3"),
        ({"contributors": []}, "contributors"),
        ({"contributors": [RECORD.contributors[0]] * 2}, "named twice"),
        ({"dropped": [Dropped("a", "late")]}, "named twice"),
        ({"contributors": [replace(RECORD.contributors[0], weight=0.0)]}, "weights"),
        ({"previous": "x"}, "previous"),
        ({"ledger_rows": 0}, "ledger_rows"),
    ],
)
def test_other_records_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSignature, match=words):
        opened(sign_commit(replace(RECORD, **changes), COORDINATOR))


def test_records_of_other_signers_are_refused() -> None:
    with pytest.raises(BadSignature):
        opened(sign_commit(RECORD, KEYS["a"]))
    with pytest.raises(BadSignature):
        opened(sign_document(OFFER_KIND, asdict(RECORD), COORDINATOR))
