"""A lease: the coordinator's signed statement of what one worker samples, and its seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from pydantic import TypeAdapter

from runspec.core.canonical import digest_bytes, hash_parts
from runspec.core.signed import (
    STRICT,
    Digest,
    Natural,
    SigningKey,
    Time,
    open_payload,
    sign_document,
)

KIND = "lease"
MAX_BYTES = 8 * 1024


@dataclass(frozen=True)
class Lease:
    """Payload of a lease."""

    __pydantic_config__ = STRICT

    run: str
    step: Natural
    nonce: Digest
    """32 random bytes in hex, drawn when the step opened."""
    worker: Digest
    """The worker's public key."""
    pool: str
    """Sampler pool of the spec, which defines how to sample."""
    index: Natural
    """0, 1, 2, ... for each worker and step, without holes."""
    groups: Natural
    version: Natural
    manifest_digest: Digest
    issued: Time
    expires: Time
    devices: str = ""
    """The worker's (`verify.profile.devices_of`); with the pool they choose its checks' limits."""

    @cached_property
    def seed(self) -> bytes:
        """Seed of problems, target lengths and token noise: 32 bytes that no worker can
        influence."""
        return hash_parts(
            "lease", self.run, self.step, bytes.fromhex(self.nonce), self.worker, self.index
        )


_CODEC = TypeAdapter(Lease)


@dataclass(frozen=True)
class Assignment:
    """Assignment of one group of a lease."""

    group: int
    problem: int
    """Index into the run's problems."""
    target: int | None
    """Length asked for, in output tokens."""


def assignments(lease: Lease, *, n_problems: int, targets: list[int]) -> list[Assignment]:
    """Return problem and target of each group of a lease, which depend on the seed only.

    256 bits are reduced modulo `n_problems`, so the bias is below 2**-200.
    """
    result = []
    for group in range(lease.groups):
        problem = _draw(lease.seed, "problem", group, n_problems)
        target = targets[_draw(lease.seed, "target", group, len(targets))] if targets else None
        result.append(Assignment(group, problem, target))
    return result


def episode_seed(lease: Lease, group: int) -> int:
    """Return the seed of a group's episodes of several turns, 0 <= seed < 2**63."""
    return int.from_bytes(hash_parts("episode", lease.seed, group)[:8], "big") >> 1


def sign_lease(lease: Lease, key: SigningKey) -> bytes:
    return sign_document(KIND, asdict(lease), key)


def open_lease(data: bytes, *, coordinators: frozenset[str]) -> Lease:
    """Check a lease and return it.

    Raises:
        BadSignature: it is not signed by a coordinator, or its fields are not valid.
    """
    return open_payload(_CODEC, data, kind=KIND, keys=coordinators, max_bytes=MAX_BYTES)[0]


def lease_digest(data: bytes) -> str:
    """Return the digest that names a signed lease in a submission."""
    return digest_bytes(data)


def _draw(seed: bytes, what: str, group: int, bound: int) -> int:
    return int.from_bytes(hash_parts(what, seed, group), "big") % bound


MAX_OPEN_LEASES = 3
"""Most open leases of a worker: one fills the engine, one has its last sequences sampled, one is
being submitted. With fewer leases the engine idles at the end of each. More leases would bind
groups to one worker and to older versions."""
