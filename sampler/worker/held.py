"""A lease in the worker's hands, from the grant to the submission."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from sampler.engine.requests import Sampled
from sampler.worker.rollouts import PlannedRollout
from sampler.worker.schedule import OpenLease, Stage
from verify.formats.lease import Lease


@dataclass
class HeldLease:
    """Changed by the loop's thread alone."""

    lease: Lease
    digest: str
    plan: Sequence[PlannedRollout]
    stage: Stage = "waiting"
    future: Future[list[Sampled]] | None = None
    """Of its sampling; a new one where it is sampled again."""
    deaths: int = 0
    """Engines that died under it."""
    since: float = field(default_factory=time.monotonic)
    """When its sampling began."""

    def seen(self) -> OpenLease:
        return OpenLease(self.digest, self.lease.version, self.stage)


@dataclass(frozen=True)
class Granted:
    """The coordinator granted a lease, and its version is on this machine."""

    lease: Lease
    digest: str
    plan: Sequence[PlannedRollout]


@dataclass(frozen=True)
class NoLease:
    """There was none just now."""


@dataclass(frozen=True)
class Ended:
    """The engine is done with a lease, one way or the other."""

    digest: str
    future: Future[list[Sampled]]


@dataclass(frozen=True)
class Dealt:
    """A lease is handed in, or refused."""

    digest: str


@dataclass(frozen=True)
class Failed:
    """The thread that asks for leases came to an end: the run is finished, or something broke."""

    error: BaseException


Happening = Granted | NoLease | Ended | Dealt | Failed
