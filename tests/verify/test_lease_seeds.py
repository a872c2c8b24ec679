"""What a lease seeds: no two leases share it, and nothing in it is left to the worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from runspec.core.hashing import digest_bytes
from verify.formats.lease import Lease, assignments
from verify.noise import noise_key

TARGETS = [8, 16, 24, 32]
LEASE = Lease(
    run="run",
    step=5,
    nonce=digest_bytes(b"nonce"),
    worker=digest_bytes(b"worker"),
    pool="pool",
    index=5,
    groups=4,
    version=4,
    manifest_digest=digest_bytes(b"manifest"),
    issued=0.0,
    expires=60.0,
)


def drawn(lease: Lease) -> list[tuple[int, int | None]]:
    return [(a.problem, a.target) for a in assignments(lease, n_problems=2**40, targets=TARGETS)]


@pytest.mark.parametrize(
    "change",
    [
        {"run": "another"},
        {"step": 6},
        {"index": 6},
        {"nonce": digest_bytes(b"another")},
        {"worker": digest_bytes(b"another")},
    ],
)
def test_each_part_of_the_seed_changes_problems_and_noise(change: dict[str, object]) -> None:
    other = replace(LEASE, **change)

    assert not set(drawn(other)) & set(drawn(LEASE))
    assert noise_key(other.seed, 0, 0) != noise_key(LEASE.seed, 0, 0)


def test_equal_numbers_in_other_places_give_other_seeds() -> None:
    places = [replace(LEASE, step=step, index=index) for step in range(12) for index in range(12)]

    assert len({lease.seed for lease in places}) == len(places)


def test_problems_and_targets_follow_the_seed_alone_and_every_target_is_drawn() -> None:
    # A version, a deadline or a signature that differs draws nothing new: they can be chosen.
    again = replace(LEASE, version=5, issued=9.0, expires=99.0, manifest_digest=LEASE.nonce)
    leases = [replace(LEASE, index=index, groups=16) for index in range(64)]
    counts = Counter(target for lease in leases for _, target in drawn(lease))

    assert drawn(again) == drawn(LEASE)
    assert set(counts) == set(TARGETS)
    assert all(200 <= count <= 312 for count in counts.values())  # 256 expected, 4 sigma
