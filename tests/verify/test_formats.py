"""Documents and tables that cross the trust boundary: what is believed, and what is not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from runspec.core.signed import BadSignature, SigningKey, sign_document
from tests.fuzz.documents import DIGEST, KEY, KINDS, said
from tests.fuzz.files import SUBMISSION, VERDICT, Kind, check_rows
from verify.formats.batch import (
    BatchGroup,
    BatchManifest,
    IslandShare,
    RangeManifest,
    RowRange,
    divide,
    open_batch,
    open_ranges,
    sign_batch,
    sign_ranges,
)
from verify.formats.lease import Lease, assignments
from verify.formats.submission import decode_rollouts, encode_rollouts
from verify.formats.tables import MalformedTable
from verify.formats.verdict import MAX_CHECKS, MAX_FAULT, decode_verdicts, encode_verdicts
from verify.noise import noise_key

NAMES = ["a", "b", "c"]

# --- signed documents ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_document_is_read_as_its_role_signed_it_and_no_other(name: str) -> None:
    kind = KINDS[name]
    for payload in kind.payloads:
        assert said(kind.open(kind.signed(payload))) == payload
    for data in (
        sign_document("another", payload, KEY),
        sign_document(name, payload, SigningKey.generate()),
        kind.signed(payload).replace(b'"payload":{', b'"payload":{"x":1,'),
        *([kind.signed({**payload, "more": 1})] if name not in ("site", "roles") else []),
    ):
        with pytest.raises(BadSignature):
            kind.open(data)


A = KINDS["commit"].payloads[0]["contributors"][0]
OF_STEPS = ("batch", "ranges", "commit")
LIES: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"run": "other"}, "of other step 3, not demo step 3") for name in OF_STEPS),
    *((name, {"step": 4}, "of demo step 4, not demo step 3") for name in OF_STEPS),
    *((name, {"ledger_rows": 0}, "ledger_rows") for name in OF_STEPS),
    *((name, {"ledger_chain": "x"}, "ledger_chain") for name in OF_STEPS),
    ("batch", {"groups": [KINDS["batch"].payloads[0]["groups"][0]] * 2}, "a group is named twice"),
    *(
        ("ranges", {"rows": {"first": first, "last": last}}, words)
        for first, last, words in (
            *((18, 23, "rows 18 to 23 in step 3, which has 18 to 24"), (17, 23, "in step 3")),
            *((24, 18, "rows 24 to 18 in step 3"), (-6, 0, "rows.first")),
        )
    ),
    *(
        ("share", {name: value}, words)
        for name, value, words in (
            *(("run", "other", "of run other, not demo"), ("step", -1, "step")),
            ("island", "b", "of island b, signed by another island"),
            *(("island", "../b", "island"), ("base", "x", "base"), ("url", "ftp://a", "url")),
            *(("url", "http://" + "a" * 394, "url"), ("bytes", 0, "bytes")),
            *(("bytes", 2**53, "bytes"), ("weight", -1.0, "weight"), ("norm", 2.0**53, "norm")),
        )
    ),
    ("commit", {"contributors": []}, "contributors"),
    ("commit", {"contributors": [A, A]}, "named twice"),
    ("commit", {"dropped": [{"island": "a", "reason": "late"}]}, "named twice"),
    ("commit", {"dropped": [{"island": "c", "reason": "x" * 401}]}, "dropped"),
    ("commit", {"contributors": [{**A, "weight": 0.0}]}, "weights"),
    ("commit", {"previous": "x"}, "previous"),
    ("lease", {"step": 2**31}, "step"),
    ("lease", {"groups": -1}, "groups"),
    ("lease", {"expires": 2.0**53}, "expires"),
    ("lease", {"worker": "x"}, "64 hex characters"),
    ("submission", {"worker": DIGEST}, "signed by another key than its worker's"),
    ("submission", {"bytes": "1"}, "bytes"),
    ("verdict", {"accepted": False}, "must have a reason"),
    ("verdict", {"reason": "why"}, "must have a reason"),
    *(
        ("verdict", {"fault": fault}, "one printable line")
        for fault in ("two\nlines", "\x1b[2Jgone", "a" * (MAX_FAULT + 1))
    ),
    ("site", {"run": "other"}, "of run 'other', not 'demo'"),
    *(
        ("site", {"files": [{"source": "s", "path": path, "bytes": 7, "digest": DIGEST}]}, "files")
        for path in ("/a", "../a", "a/../../b", "a\\b", "a\0", "", "x" * 401)
    ),
]


@pytest.mark.parametrize(("name", "changes", "words"), LIES)
def test_another_payload_is_refused_and_named(
    name: str, changes: dict[str, Any], words: str
) -> None:
    kind = KINDS[name]
    with pytest.raises(BadSignature, match=words):
        kind.open(kind.signed({**kind.payloads[0], **changes}))


# --- shares of a step ---------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "count"), [(6, 3), (7, 3), (1, 4), (0, 2), (1000, 7)])
def test_shares_divide_a_step_evenly_and_in_order(size: int, count: int) -> None:
    names = [str(i) for i in range(count)]
    shares = divide(10, 10 + size, names)
    assert [share.island for share in shares] == names
    assert [share.first for share in shares] == [10, *(share.last for share in shares[:-1])]
    assert shares[-1].last == 10 + size
    sizes = [share.last - share.first for share in shares]
    assert max(sizes) - min(sizes) <= 1 and divide(0, 6, []) == []


GROUPS = [BatchGroup("01" * 32, "02" * 32, group, 0, 0) for group in range(6)]
MANIFESTS = {
    "ranges": lambda shares: sign_ranges(
        RangeManifest("demo", 3, RowRange(18, 24), 7, DIGEST, shares), KEY
    ),
    "batch": lambda shares: sign_batch(
        BatchManifest(
            *("demo", 3, GROUPS, True, {}, 7, DIGEST),
            [replace(share, first=share.first - 18, last=share.last - 18) for share in shares],
        ),
        KEY,
    ),
}


def opened(name: str, data: bytes) -> RangeManifest | BatchManifest:
    if name == "batch":
        return open_batch(data, coordinators=None, run="demo", step=3)
    return open_ranges(data, coordinators=None, run="demo", step=3, rows_per_step=6)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_names_shares_that_divide_its_step_or_has_no_field_for_them(name: str) -> None:
    first = 18 if name == "ranges" else 0
    sign = MANIFESTS[name]
    assert opened(name, sign(divide(18, 24, NAMES))).shares == divide(first, first + 6, NAMES)
    # without islands a manifest is signed as before there were any
    assert b"shares" not in sign([]) and opened(name, sign([])).shares == []
    for shares in (
        divide(18, 23, NAMES),
        divide(18, 24, NAMES)[:2],
        [IslandShare("a", 18, 20), IslandShare("b", 20, 23), IslandShare("c", 23, 24)],
        [IslandShare("a", 18, 21), IslandShare("b", 20, 24)],
        divide(18, 24, ["a", "a"]),
    ):
        with pytest.raises(BadSignature, match=r"do not divide|named twice"):
            opened(name, sign(shares))


# --- what a lease seeds -------------------------------------------------------------------------

TARGETS = [8, 16, 24, 32]
LEASE = Lease("run", 5, DIGEST, "cd" * 32, "pool", 5, 4, 4, "ef" * 32, 0.0, 60.0)


def drawn(lease: Lease) -> list[tuple[int, int | None]]:
    return [(a.problem, a.target) for a in assignments(lease, n_problems=2**40, targets=TARGETS)]


@pytest.mark.parametrize(
    "change",
    [{"run": "another"}, {"step": 6}, {"index": 6}, {"nonce": "01" * 32}, {"worker": "01" * 32}],
)
def test_each_part_of_the_seed_changes_problems_and_noise(change: dict[str, object]) -> None:
    other = replace(LEASE, **change)
    assert not set(drawn(other)) & set(drawn(LEASE))
    assert noise_key(other.seed, 0, 0) != noise_key(LEASE.seed, 0, 0)


def test_problems_and_targets_follow_the_seed_alone_and_every_target_is_drawn() -> None:
    # A version, a deadline or a signature that differs draws nothing new: they can be chosen.
    again = replace(LEASE, version=5, issued=9.0, expires=99.0, manifest_digest="01" * 32)
    assert drawn(again) == drawn(LEASE)
    leases = [replace(LEASE, index=index, groups=16) for index in range(64)]
    counts = Counter(target for lease in leases for _, target in drawn(lease))
    assert set(counts) == set(TARGETS)
    assert all(200 <= count <= 312 for count in counts.values())  # 256 expected, 4 sigma
    assert assignments(LEASE, n_problems=1, targets=[])[0].target is None


# --- tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SUBMISSION, VERDICT], ids=["submission", "verdict"])
def test_what_is_written_is_read(kind: Kind) -> None:
    rows = kind.decode(kind.file)
    check_rows(kind, rows)
    assert repr(rows) == repr(kind.rows)
    assert kind.encode(rows) == kind.file and kind.decode(kind.encode([])) == []


def test_safetensors_reads_the_columns_and_a_group_shares_its_prompt() -> None:
    found, rows = load(SUBMISSION.file), SUBMISSION.rows
    assert np.array_equal(found["logprobs"], np.concatenate([row.logprobs for row in rows]))
    assert found["proofs"].shape == (sum(len(row.proofs) for row in rows), 258)
    assert found["prompt_tokens.index"].tolist() == [0, 0, 1, 1]
    # and its arrays are views that nobody can write
    (row, *_) = decode_rollouts(SUBMISSION.file, max_rows=4, max_bytes=1 << 20)
    assert row.logprobs.flags.aligned and not row.logprobs.flags.writeable
    row = replace(rows[0], prompt_tokens=np.arange(10_000, dtype=np.int32))
    one, many = (len(encode_rollouts([row] * count)) for count in (1, 9))
    assert many - one < 8 * 1500


def test_proofs_and_checks_of_a_row_are_bounded() -> None:
    with pytest.raises(ValueError, match="proofs: 257 bytes instead of 258"):
        encode_rollouts([replace(SUBMISSION.rows[0], proofs=[bytes(257)])])
    row = VERDICT.rows[0]
    for count in (MAX_CHECKS, MAX_CHECKS + 1):
        data = encode_verdicts([replace(row, checks=row.checks[:1] * count)])
        if count == MAX_CHECKS:
            assert len(decode_verdicts(data)[0].checks) == MAX_CHECKS
    with pytest.raises(MalformedTable, match=f"{MAX_CHECKS + 1} elements of a row, more than"):
        decode_verdicts(data)
