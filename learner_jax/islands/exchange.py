"""The exchange of one island with the others: it offers a share, and gets what a record names.

One thread waits for records and fetches shares, so that an island may train meanwhile. Everything
here is numpy and HTTP; the collective parts are in `island`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bridge.codecs import Codec
from learner_jax.islands.outer import weighted_mean
from learner_jax.islands.state import Flat
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from verify.formats.islands import CommitRecord, Contribution, ShareOffer, sign_offer
from verify.island_client import Committed, IslandClient

WAIT_S = 20.0
"""Seconds that the coordinator may hold a question for a record."""
FETCH_S = 1800.0
"""Seconds that a share may take to arrive."""
REPORT_EVERY_S = 30.0


class Stopped(Exception):  # noqa: N818 it is no error
    """This process was told to end while it waited for the others."""


class Shares(Protocol):
    """Where shares lie: this island's own store, and the servers of the others."""

    def own(self, step: int) -> tuple[bytes, str] | None:
        """Return this island's share of a step and its manifest's digest, if it is stored."""

    def put(self, step: int, data: bytes) -> str:
        """Store this island's share of a step; return its manifest's digest."""

    def fetch(self, step: int, share: Contribution, deadline_s: float) -> bytes:
        """Return another island's share, checked against the digest of its contribution."""


@dataclass(frozen=True)
class Settled:
    """A record and what its shares come to."""

    record: CommitRecord
    mean: Flat
    """Weighted mean of the shares that count, float32 [n]."""
    cosines: dict[str, float]
    """Cosine of each share and the mean of the others, by island; none for a single share."""
    refused: frozenset[str]
    """Islands whose cosine is below `min_cosine`: the mean leaves out their shares."""
    received: int
    """Bytes of the other islands' shares."""
    seconds: float
    """From the question for the record to the mean."""

    def counted(self, island: str) -> bool:
        """Return whether an island's share is in the mean."""
        named = any(each.island == island for each in self.record.contributors)
        return named and island not in self.refused


@dataclass
class Exchange(AbstractContextManager["Exchange"]):
    """Offers, records and shares of one island, in process 0 of its learner."""

    run: str
    island: str
    key: SigningKey
    url: str
    """Where the others find this island's store."""
    corpus: str
    """Digest of the documents; empty for a run that trains on rollouts."""
    codec: Codec
    size: int
    """n: elements of a share."""
    min_cosine: float | None
    client: IslandClient
    shares: Shares
    stop: threading.Event
    """Set when this process is told to end."""
    log: logging.Logger
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="exchange")
    )
    _settling: tuple[int, Future[Settled]] | None = None

    def offer(self, step: int, base: str, data: bytes, weight: float, norm: float) -> None:
        """Store a share and tell the coordinator of it.

        A share that this island stored before is offered again in the place of `data`: others may
        have it already.

        Args:
            step: its number.
            base: digest of the outer state that the share is measured from.
            data: the encoded share.
            weight: loss denominator of the island's part of the step.
            norm: L2 norm of the share.

        Raises:
            UserError: the store cannot be written, or the coordinator refuses the offer because
                outer states or documents differ.
        """
        before = self.shares.own(step)
        if before is not None:
            if before[0] != data:
                self.log.info("step %d: the share that was offered before stays", step)
            data, manifest = before
        else:
            manifest = self.shares.put(step, data)
        offer = ShareOffer(
            run=self.run,
            step=step,
            island=self.island,
            base=base,
            data=self.corpus,
            url=self.url,
            manifest=manifest,
            share=digest_bytes(data),
            bytes=len(data),
            weight=weight,
            norm=norm,
        )
        if self.client.offer(sign_offer(offer, self.key)) is Committed.WITHOUT:
            self.log.warning("step %d is committed without this island's share", step)

    def record(self, step: int) -> CommitRecord | None:
        """Return the record of a step if there is one already."""
        return self.client.record(step, wait_s=0.0).record

    def settle(self, step: int) -> None:
        """Begin to wait for the record of a step and for its shares."""
        self._settling = step, self._thread.submit(self._settle, step)

    def settled(self, step: int) -> Settled:
        """Return what `settle` waited for.

        Raises:
            Stopped: this process was told to end; `settle` begins anew.
            UserError: a share cannot be had, or is not what its island signed.
        """
        if self._settling is None or self._settling[0] != step:
            self.settle(step)
        assert self._settling is not None, "just begun"
        return self._settling[1].result()

    def report(self, step: int, digest: str) -> None:
        """Tell the coordinator of the outer state after a step.

        Raises:
            UserError: another island has another one: this island's memory or program is wrong.
        """
        self.client.result(step, digest)

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self._thread.shutdown(wait=True)
        self.client.close()

    def _settle(self, step: int) -> Settled:
        begun = time.monotonic()
        record = self._await_record(step)
        if record.codec != self.codec.kind:
            raise UserError(
                f"the record of step {step} is of codec {record.codec}",
                remedy="apply the same spec to every island",
            )
        data = dict(
            zip(
                (each.island for each in record.contributors),
                self._gather(step, record.contributors),
                strict=True,
            )
        )
        weights = {each.island: each.weight for each in record.contributors}
        mean = self._mean(data, weights)
        cosines = self._cosines(data, weights, mean)
        refused = self._refused(step, cosines)
        if refused:
            mean = self._mean({i: each for i, each in data.items() if i not in refused}, weights)
        received = sum(len(each) for island, each in data.items() if island != self.island)
        return Settled(record, mean, cosines, refused, received, time.monotonic() - begun)

    def _await_record(self, step: int) -> CommitRecord:
        begun, report_at = time.monotonic(), REPORT_EVERY_S
        while True:
            if self.stop.is_set():
                raise Stopped
            answer = self.client.record(step, wait_s=WAIT_S)
            if answer.record is not None:
                return answer.record
            waited = time.monotonic() - begun
            if waited >= report_at:
                names = ", ".join(answer.waiting_for) or "the coordinator"
                self.log.info("step %d: %.0f s waiting for the shares of %s", step, waited, names)
                report_at = waited + REPORT_EVERY_S

    def _gather(self, step: int, contributors: Sequence[Contribution]) -> list[bytes]:
        """Return the shares of a record, in its order; those of others at once."""
        with ThreadPoolExecutor(max(1, len(contributors)), "share") as threads:
            return list(threads.map(lambda share: self._share(step, share), contributors))

    def _share(self, step: int, share: Contribution) -> bytes:
        if share.island == self.island:
            own = self.shares.own(step)
            if own is not None and digest_bytes(own[0]) == share.share:
                return own[0]
        return self.shares.fetch(step, share, FETCH_S)

    def _mean(self, data: Mapping[str, bytes], weights: Mapping[str, float]) -> Flat:
        decoded = (self.codec.decode(each, self.size) for each in data.values())
        return weighted_mean(decoded, [weights[island] for island in data])

    def _cosines(
        self, data: Mapping[str, bytes], weights: Mapping[str, float], mean: Flat
    ) -> dict[str, float]:
        total = sum(weights.values())
        if len(data) < 2:
            return {}
        return {
            island: cosine_to_others(
                self.codec.decode(each, self.size), mean, weights[island] / total
            )
            for island, each in data.items()
        }

    def _refused(self, step: int, cosines: Mapping[str, float]) -> frozenset[str]:
        """Return the islands below `min_cosine`.

        Raises:
            UserError: they are all of them.
        """
        if self.min_cosine is None:
            return frozenset()
        refused = frozenset(i for i, cosine in cosines.items() if cosine < self.min_cosine)
        if refused and refused == cosines.keys():
            raise UserError(
                f"step {step}: no two shares point the same way: {dict(cosines)}",
                place="learner.islands.min_cosine",
                remedy="lower the bound, or see what the islands train on",
            )
        for island in sorted(refused):
            self.log.warning(
                "step %d: the share of island %s is refused: its cosine to the others is %.3f",
                *(step, island, cosines[island]),
            )
        return refused


def cosine_to_others(share: Flat, mean: Flat, part: float) -> float:
    """Return the cosine of a share and of the weighted mean of the others; 0 where one is zero.

    Args:
        share: float32 [n].
        mean: weighted mean of all shares, float32 [n].
        part: weight of the share in the mean, 0 to 1.
    """
    others = mean - np.float32(part) * share  # up to a factor, which a cosine does not see

    def product(a: Flat, b: Flat) -> float:
        """Sum without BLAS, whose order of additions depends on the machine."""
        return float(np.sum(a * b, dtype=np.float64))

    norms = product(share, share) * product(others, others)
    return product(share, others) / math.sqrt(norms) if norms > 0.0 else 0.0
