"""A lease: the coordinator's signed word on what one worker is to sample, and its seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from runspec.core.hashing import digest_bytes, hash_parts, is_digest
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, open_document, sign_document

KIND = "lease"
MAX_BYTES = 8 * 1024


@dataclass(frozen=True)
class Lease:
    """Payload of a lease; times are seconds since the epoch."""

    run: str
    step: int
    nonce: str
    """32 random bytes in hex, drawn when the step opened."""
    worker: str
    """The worker's public key."""
    pool: str
    """The sampler pool of the spec that says how to sample."""
    index: int
    """0, 1, 2, ... for each worker and step, without holes."""
    groups: int
    version: int
    manifest_digest: str
    issued: float
    expires: float

    @cached_property
    def seed(self) -> bytes:
        """Seeds problems, target lengths and token noise: 32 bytes no worker can influence."""
        return hash_parts(
            "lease", self.run, self.step, bytes.fromhex(self.nonce), self.worker, self.index
        )


@dataclass(frozen=True)
class Assignment:
    """What one group of a lease samples."""

    group: int
    problem: int
    """Index into the run's problems."""
    target: int | None
    """Length asked for, in output tokens."""


def assignments(lease: Lease, *, n_problems: int, targets: list[int]) -> list[Assignment]:
    """The groups of a lease: each its problem and target, from the seed alone.

    256 bits reduced modulo `n_problems`: the bias is below 2**-200.
    """
    result = []
    for group in range(lease.groups):
        problem = _draw(lease.seed, "problem", group, n_problems)
        target = targets[_draw(lease.seed, "target", group, len(targets))] if targets else None
        result.append(Assignment(group, problem, target))
    return result


def sign_lease(lease: Lease, key: SigningKey) -> bytes:
    return sign_document(KIND, asdict(lease), key)


def open_lease(data: bytes, *, coordinators: frozenset[str]) -> Lease:
    """Checks a lease and returns it.

    Raises:
        BadSignature: not signed by a coordinator, or its fields are not a lease's.
    """
    payload = open_document(data, kind=KIND, keys=coordinators, max_bytes=MAX_BYTES).payload
    try:
        lease = Lease(**payload)
    except TypeError as error:
        raise BadSignature(f"lease: {error}") from error
    integers = (lease.step, lease.index, lease.groups, lease.version)
    if not all(type(n) is int and 0 <= n < 2**31 for n in integers):
        raise BadSignature("lease: step, index, groups and version must be natural numbers")
    if not all(is_digest(h) for h in (lease.nonce, lease.worker, lease.manifest_digest)):
        raise BadSignature("lease: nonce, worker and manifest_digest must be 64 hex characters")
    if not (isinstance(lease.run, str) and isinstance(lease.pool, str)):
        raise BadSignature("lease: run and pool must be names")
    if not all(type(t) in (int, float) and 0 <= t < 2**53 for t in (lease.issued, lease.expires)):
        raise BadSignature("lease: issued and expires must be seconds since the epoch")
    return lease


def lease_digest(data: bytes) -> str:
    """Names a signed lease in a submission."""
    return digest_bytes(data)


def _draw(seed: bytes, what: str, group: int, bound: int) -> int:
    return int.from_bytes(hash_parts(what, seed, group), "big") % bound
