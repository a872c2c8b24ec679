"""A lease in the worker's hands, from the grant to the submission, and what happens to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from sampler.engine.requests import Sampled
from sampler.worker.rollouts import PlannedRollout
from sampler.worker.schedule import OpenLease
from verify.formats.lease import Lease


@dataclass
class HeldLease(OpenLease):
    """Changed by the loop's thread alone."""

    lease: Lease
    plan: Sequence[PlannedRollout]
    future: Future[list[Sampled]] | None = None
    """Of its sampling; a new one where it is sampled again."""
    deaths: int = 0
    """Engines that died under it."""
    since: float = field(default_factory=time.monotonic)
    """When its sampling began."""


@dataclass(frozen=True)
class Granted:
    """The coordinator granted a lease, and its version is on this machine."""

    lease: Lease
    digest: str
    plan: Sequence[PlannedRollout]


@dataclass(frozen=True)
class NotGranted:
    """There is no lease just now, or the coordinator cannot be asked for one any more."""

    error: BaseException | None = None


@dataclass(frozen=True)
class SamplingEnded:
    """The engine is done with a lease, one way or the other."""

    digest: str
    future: Future[list[Sampled]]


@dataclass(frozen=True)
class Settled:
    """A lease is handed in or refused, or its submission failed."""

    digest: str
    error: BaseException | None = None


Event = Granted | NotGranted | SamplingEnded | Settled
