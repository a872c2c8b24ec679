"""The exchange of one island with the others: it offers a share, and gets what a record names.

One thread sends an offer while another waits for its record and fetches shares, so that an island
may train meanwhile. Everything here is numpy and HTTP, in process 0; the collective parts are in
`island`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np

from bridge.tensors import codec
from broadcast.store import AlreadyPublished
from learner_jax.islands import BadObject, Silent
from learner_jax.islands.state import (
    ATTEMPT_S,
    REJOIN,
    REPORT_EVERY_S,
    Behind,
    Flat,
    Joining,
    OuterState,
    Stopped,
    outer_update,
    weighted_mean,
)
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from verify.formats.batch import CommitRecord, ShareOffered
from verify.island_client import Committed

WAIT_S = 5.0
"""Seconds that the coordinator may hold a question for a record; a stop takes effect after it."""
FETCH_S = 1800.0
"""Seconds that the shares of a step may take to arrive."""
LAST_ATTEMPT_S = 5.0
"""Seconds of one try for shares that were removed, unless somebody was still reading them."""
_CANCEL_EVERY_S = 0.1


@dataclass(frozen=True)
class Settled:
    """A record and what its shares come to."""

    record: CommitRecord
    mean: Flat
    """Weighted mean of the shares that count, float32 [n]."""
    outer: OuterState
    """Outer state of the next version."""
    cosines: dict[str, float]
    """Cosine of each share and the mean of the others, by island; none for a single share."""
    refused: frozenset[str]
    """Islands whose cosine is below `min_cosine`: the mean leaves out their shares."""
    received: int
    """Bytes of the other islands' shares."""
    seconds: float
    """From the question for the record to its last word."""

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the shares in the mean, by island."""
        shares = self.record.contributors
        return {each.island: each.weight for each in shares if each.island not in self.refused}

    @property
    def dropped(self) -> dict[str, str]:
        """Islands whose share is not in the mean, and why."""
        reasons = {each.island: each.reason for each in self.record.dropped}
        for island in sorted(self.refused):
            cosine = self.cosines[island]
            reasons[island] = f"the cosine of its share to the others is {cosine:.3f}"
        return reasons

    def part(self, island: str) -> float | None:
        """Return an island's part of the weights in the mean, 0 to 1; None if it has none."""
        weights = self.weights
        return weights[island] / sum(weights.values()) if island in weights else None


@dataclass
class Exchange(Joining, AbstractContextManager["Exchange"]):
    """Offers, records and shares of one island, beside its outer states."""

    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="exchange")
    )
    _offering: Future[None] | None = None
    _settling: tuple[int, Future[Settled]] | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _own: tuple[int, bytes] | None = None
    """The last share that was offered, with its step."""

    def offer(self, step: int, outer: OuterState, data: bytes, weight: float, norm: float) -> None:
        """Store a share, begin to tell the coordinator of it and to wait for the step's record.

        The record may be there before the answer to the last offer is, so the two are not waited
        for one after the other. Where this island stored another share of the step before, that one
        counts: the others may have it already.

        Args:
            step: its number.
            outer: state that the share is measured from.
            data: the encoded share.
            weight: loss denominator of the island's part of the step.
            norm: L2 norm of the share.

        Raises:
            UserError: the store cannot be written.
        """
        try:
            manifest = self.store.put_share(step, data)
        except AlreadyPublished as there:
            before = self.store.share(step)
            if before is None:
                raise
            self.log.warning("step %d: trained again, another share: the first stays", step)
            data, manifest = before, there.manifest_digest
        self._own = step, data
        offer = ShareOffered(
            run=self.run,
            step=step,
            island=self.island,
            base=outer.digest,
            data=self.corpus,
            url=self.url,
            manifest=manifest,
            share=digest_bytes(data),
            bytes=len(data),
            weight=weight,
            norm=norm,
        )
        self._offering = self._threads.submit(self._tell, offer)
        self._settling = step, self._threads.submit(self._settle, step, outer)

    def offered(self) -> None:
        """Wait until the coordinator has the last offer, which no other process would repeat.

        Raises:
            UserError: the coordinator does not answer, or it refuses the offer because outer states
                or documents differ.
        """
        if self._offering is not None:
            self._offering.result()

    def settled(self, step: int, outer: OuterState) -> Settled:
        """Wait until the record of a step is final, and for what follows from its shares.

        Args:
            step: its number.
            outer: state in which it began.

        Raises:
            Stopped: this process was told to end.
            UserError: as `offered`; or a share cannot be had, or is not what its island signed; or
                the others have another outer state.
        """
        self.offered()
        if self._settling is None or self._settling[0] != step:
            self._settling = step, self._threads.submit(self._settle, step, outer)
        return self._settling[1].result()

    def left_out(self, step: int) -> bool:
        """Return whether a step has a record, and that names no share of this island."""
        record = self._record(step)
        return record is not None and all(e.island != self.island for e in record.contributors)

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        while self._settling and not wait([self._settling[1]], _CANCEL_EVERY_S).done:
            self.fetcher.cancel()
        self._threads.shutdown()
        self.fetcher.close()

    def _tell(self, offer: ShareOffered) -> None:
        if not self.client.offer(offer):
            self.log.info("step %d is committed already", offer.step)

    def _check_stop(self) -> None:
        if self.stop.is_set() or self._ended.is_set():
            raise Stopped

    def _settle(self, step: int, outer: OuterState) -> Settled:
        begun = time.monotonic()
        while True:
            committed = self._await_record(step)
            data = self._gather(step, committed)
            if data is None:
                continue  # it has another record by now
            found = self._follow(step, committed.record, data, outer)
            reported = step, committed.digest, found.outer.digest
            while (final := self.client.result(*reported, WAIT_S)) is False:
                self._check_stop()
            if final:
                return replace(found, seconds=time.monotonic() - begun)

    def _await_record(self, step: int) -> Committed:
        begun, report_at = time.monotonic(), REPORT_EVERY_S
        while True:
            self._check_stop()
            answer = self.client.record(step, WAIT_S)
            if isinstance(answer, Committed):
                return answer
            waited = time.monotonic() - begun
            if waited >= report_at:
                names = ", ".join(answer.waiting_for) or "nobody: the coordinator is late"
                self.log.info("step %d: %.0f s waiting for the shares of %s", step, waited, names)
                # One of them may wait for an outer state; a restarted coordinator knows of none.
                self.publish()
                report_at = waited + REPORT_EVERY_S

    def _gather(self, step: int, committed: Committed) -> dict[str, bytes] | None:
        """Return the shares of a record, in its order; those of others are fetched at once.

        They come from where their islands are now: one may have moved since its offer. Where no
        byte of a share arrives for `silence`, the coordinator may leave it out.

        Returns:
            None if the step has another record by now.

        Raises:
            Stopped: this process was told to end.
            BadObject: a share is not what its island signed.
            Behind: its island has removed a share.
            UserError: a share cannot be had.
        """
        client, deadline, silence_s = self.client, time.monotonic() + FETCH_S, self.islands.silence
        contributors = committed.record.contributors
        others = [each for each in contributors if each.island != self.island]
        while True:
            urls = {each.island: each.url for each in client.outer_states().stored}
            moved = [replace(each, url=urls.get(each.island, each.url)) for each in others]
            left, removed = deadline - time.monotonic(), self._removed(step)
            patience_s = ATTEMPT_S if silence_s == math.inf else silence_s + ATTEMPT_S
            attempt_s = min(left, LAST_ATTEMPT_S if removed else patience_s)
            try:
                fetched = self.fetcher.fetch_shares(step, moved, attempt_s, silence_s)
                break
            except CancelledError as error:
                raise Stopped from error
            except BadObject:
                raise
            except UserError as error:
                if removed:
                    raise Behind(error.thing, place=error.place, remedy=error.remedy) from error
                if isinstance(error, Silent) and not client.lost(step, error.island):
                    silence_s = math.inf  # that share stays in the record
                newest = client.record(step, 0.0)
                if not isinstance(newest, Committed) or newest.digest != committed.digest:
                    return None
                if left <= ATTEMPT_S:
                    raise
                self.log.warning("step %d: trying again: %s", step, error)
        self.fetcher.keep_only(step)
        found = {each.island: bytes(data) for each, data in zip(others, fetched, strict=True)}
        return {
            each.island: found[each.island] if each in others else self._own_share(step, each.share)
            for each in contributors
        }

    def _own_share(self, step: int, digest: str) -> bytes:
        """Return this island's share as it was offered, also by a process before this one."""
        own = self._own[1] if self._own is not None and self._own[0] == step else None
        if own is None or digest_bytes(own) != digest:
            own = self.store.share(step)
        if own is None or digest_bytes(own) != digest:
            raise UserError(
                f"step {step}: this island's own share is not the one that it offered",
                place=self.url,
                remedy=REJOIN,
            )
        return own

    def _follow(
        self, step: int, record: CommitRecord, data: Mapping[str, bytes], outer: OuterState
    ) -> Settled:
        """Return what follows from a record and its shares."""
        if record.base != outer.digest:
            raise UserError(
                f"step {step} was trained from the outer state {record.base[:16]}, this island "
                f"{self.island} has {outer.digest[:16]}",
                place=self.url,
                remedy=REJOIN,
            )
        if record.codec != self.islands.codec.kind:
            raise UserError(
                f"the record of step {step} is of codec {record.codec}",
                remedy="apply the same spec to every island",
            )
        weights = {each.island: each.weight for each in record.contributors}
        decode, total = codec(self.islands.codec.kind).decode, sum(weights.values())
        cosines: dict[str, float] = {}

        def mean_without(refused: frozenset[str]) -> Flat:
            named = [island for island in data if island not in refused]
            decoded = (decode(data[island], self.size) for island in named)
            return weighted_mean(decoded, [weights[island] for island in named])

        mean = mean_without(frozenset())
        if len(data) > 1:
            for island, share in data.items():
                part = weights[island] / total
                cosines[island] = cosine_to_others(decode(share, self.size), mean, part)
        if refused := self._refused(step, cosines):
            mean = mean_without(refused)
        received = sum(len(share) for island, share in data.items() if island != self.island)
        after = outer_update(outer, mean, self.islands.outer)
        return Settled(record, mean, after, cosines, refused, received, 0.0)

    def _refused(self, step: int, cosines: Mapping[str, float]) -> frozenset[str]:
        """Return the islands below `min_cosine`.

        Raises:
            UserError: they are all of them.
        """
        least = -math.inf if self.islands.min_cosine is None else self.islands.min_cosine
        refused = frozenset(island for island, cosine in cosines.items() if cosine < least)
        if refused and refused == cosines.keys():
            raise UserError(
                f"step {step}: every share's cosine to the others is below the bound: "
                + ", ".join(f"{island} {cosine:.3f}" for island, cosine in cosines.items()),
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
