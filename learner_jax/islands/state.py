"""State of an island between steps, how it follows the commits, and how it joins the others.

With `overlap: 0` an island ends a step s in two moves: `sent`, when it has encoded its share, and
`committed`, when the record names the shares that count. With `overlap: 1` it trains step s + 1
between the two. Both moves are functions of the record. So a replay ends with the same bits.

    theta_s           outer parameters of version s, the same bits on every island
    p_s               the island's own parameters when it sent its share of step s
    share of step s   theta_s - p_s, plus what the codec left out before
    committed         parameters += theta_(s+1) - p_s

An island whose share does not count in a step has trained that step in vain. It goes on from
theta_(s+1) with zero moments, as an island that has just joined does.

The outer optimizer (OpenDiLoCo, arXiv 2407.07852) is numpy on the host. An island starts a step at
the outer parameters theta_s and ends it at p. With the pseudo-gradients delta_i = theta_s - p of
the islands, their weights w_i, the rate lr and the momentum mu:

    g = sum_i (w_i / sum w) delta_i
    m = mu m + g
    u = g + mu m  (Nesterov)  or  m
    theta_{s+1} = theta_s - lr u

Every operation is one of IEEE 754 on single elements, in a fixed order, so that islands of any
hardware hold the same bits. Vectors are those of `bridge.tensors`: float32 [n] in a run.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from blake3 import blake3

from bridge.tensors import Codec, segments, tensor_bytes
from broadcast.store import AlreadyPublished
from learner_jax.islands import BadObject, ShareFetcher, ShareStore
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.run_files import SENT_NAME
from runspec.core.schema import Outer
from runspec.core.schema.learner import Islands
from verify.formats.batch import CommitRecord, StoredOuter
from verify.island_client import Committed, IslandClient


@dataclass(frozen=True)
class OuterState:
    """Outer parameters and momentum after a step, the same on all islands."""

    theta: np.ndarray
    """Outer parameters [n]."""
    momentum: np.ndarray
    """m, [n]; zeros before the first step."""

    @staticmethod
    def initial(theta: np.ndarray) -> OuterState:
        """Return the state before the first step, at parameters [n]."""
        return OuterState(theta, np.zeros_like(theta))

    @cached_property
    def digest(self) -> str:
        """The BLAKE3 digest of theta's bytes, then the momentum's, little-endian."""
        hasher = blake3()
        for vector in (self.theta, self.momentum):
            hasher.update(tensor_bytes(vector))
        return hasher.hexdigest()


def weighted_mean(shares: Iterable[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Return g: the mean of pseudo-gradients.

    One share need be in memory at a time.

    Args:
        shares: of one shape and type, [n], in the order of the step's record.
        weights: one for each share, in the same order; their sum is positive.

    Returns:
        [n], in the shares' type.

    Raises:
        ValueError: there are more or fewer shares than weights, or none, or the sum of the weights
            is not positive.
    """
    total = sum(weights)
    if not total > 0.0:
        raise ValueError(f"the weights of the shares sum to {total}")
    mean = None
    for share, weight in zip(shares, weights, strict=True):
        part = share.dtype.type(weight / total)
        if mean is None:
            mean = share * part
            continue
        for where in segments(len(share)):
            mean[where] += share[where] * part
    assert mean is not None, "a positive sum has a weight"
    return mean


def outer_update(state: OuterState, gradient: np.ndarray, spec: Outer) -> OuterState:
    """Return the state after a step.

    Args:
        state: before it.
        gradient: g, [n].
        spec: rate and momentum.
    """
    kind = state.theta.dtype.type
    lr, mu = kind(spec.lr), kind(spec.momentum)
    theta, momentum = np.empty_like(state.theta), np.empty_like(state.momentum)
    for where in segments(len(theta)):
        g = gradient[where]
        m = momentum[where] = state.momentum[where] * mu + g
        u = m * mu + g if spec.nesterov else m
        theta[where] = state.theta[where] - u * lr
    return OuterState(theta, momentum)


def encode_share(
    codec: Codec, delta: np.ndarray, residual: np.ndarray | None
) -> tuple[bytes, np.ndarray | None, float]:
    """Encode an island's pseudo-gradient, with error feedback where the codec has it.

        e = delta + feedback residual,   residual' = e - decode(encode(e))

    Args:
        codec: of the run.
        delta: float32 [n].
        residual: of the last share that counted, float32 [n]; None before the first.

    Returns:
        The encoded share; the new residual, None for codecs without feedback; and the L2 norm of
        the decoded share.

    Raises:
        MalformedShare: an element is not finite.
    """
    rest = delta
    if codec.feedback:
        rest = delta.copy()
        if residual is not None:
            for where in segments(len(rest)):
                rest[where] += residual[where] * np.float32(codec.feedback)
    data = codec.encode(rest)
    squares = 0.0
    for where, part in codec.parts(data, len(rest)):
        squares += float(np.square(part, dtype=np.float64).sum())
        if codec.feedback:
            rest[where] -= part
    return data, rest if codec.feedback else None, math.sqrt(squares)


Flat = np.ndarray
"""A model's weights as one float32 vector (`bridge.tensors.FlatLayout`)."""


@dataclass(frozen=True)
class Sent:
    """A step that is trained, and whose record has not come."""

    params: Flat
    """p_s; theta_s where the island sits the step out."""
    residual: Flat | None
    """The codec's residual if the share counts."""
    offered: bool
    """Whether a share was offered: not where the island had to rejoin in this step."""


@dataclass(frozen=True)
class IslandState:
    """The part of a full state that an island adds to its masters and moments."""

    version: int
    """Version of `outer`."""
    outer: OuterState
    residual: Flat | None
    """Rounding that shares have left out so far; None for codecs that leave nothing out."""
    sent: Sent | None = None
    """Step `version`, where it is trained and not committed."""

    @classmethod
    def begin(cls, version: int, outer: OuterState, codec: Codec) -> IslandState:
        """Return the state of an island that starts at a version."""
        residual = np.zeros_like(outer.theta) if codec.feedback else None
        return cls(version, outer, residual)

    def send(self, params: Flat, codec: Codec) -> tuple[IslandState, bytes, float]:
        """Encode the share of step `version`.

        Args:
            params: the island's own parameters, float32 [n].
            codec: of the run.

        Returns:
            The state that waits for the record, the share's bytes, and its norm.
        """
        data, residual, norm = encode_share(codec, self.outer.theta - params, self.residual)
        return replace(self, sent=Sent(params, residual, offered=True)), data, norm

    def sit_out(self) -> IslandState:
        """Return the state at the end of a step to which the island gives no share."""
        return replace(self, sent=Sent(self.outer.theta, self.residual, offered=False))

    def commit(self, outer: OuterState, *, counted: bool) -> IslandState:
        """Return the state after the record of step `version`.

        Args:
            outer: outer state of the next version.
            counted: whether the record names this island's share.
        """
        residual = self.sent.residual if counted and self.sent is not None else self.residual
        return IslandState(self.version + 1, outer, residual)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a full state stores beside the masters, by name."""
        found = {"theta": self.outer.theta, "momentum": self.outer.momentum}
        found["version"] = np.array([self.version], np.int64)
        if self.residual is not None:
            found["residual"] = self.residual
        if self.sent is not None:
            found[SENT_NAME] = self.sent.params
            found["sent_offered"] = np.array([self.sent.offered], np.uint8)
            if self.sent.residual is not None:
                found["sent_residual"] = self.sent.residual
        return found

    @classmethod
    def of_arrays(cls, found: Mapping[str, np.ndarray]) -> IslandState:
        """Return the state that `arrays` gave."""
        sent = None
        if SENT_NAME in found:
            offered = bool(found["sent_offered"][0])
            sent = Sent(found[SENT_NAME], found.get("sent_residual"), offered)
        outer = OuterState(found["theta"], found["momentum"])
        return cls(int(found["version"][0]), outer, found.get("residual"), sent)


ATTEMPT_S = 60.0
"""Seconds of one try to fetch; the next one asks where the islands are now."""
REPORT_EVERY_S = 30.0
KEPT_PERIODS = 2
"""Periods of `checkpoints.every` steps before the newest outer state whose shares stay in a store,
for islands that start again at an older full state."""
REJOIN = "remove this island's folder and its store, so that it joins anew"


class Stopped(Exception):
    """This process was told to end while it waited for the others."""


class Behind(UserError):
    """The others have removed shares that this island needs: it must join anew."""


@dataclass
class Joining:
    """Outer states of one island and of the others, in process 0 of its learner.

    An island goes on from a full state if that fits the coordinator's records and the shares since
    then are left. Otherwise it joins anew, from the newest outer state of another island.
    """

    run: str
    island: str
    url: str
    """Where the others find this island's store."""
    size: int
    """n: elements of a share, of theta, and of the momentum."""
    islands: Islands
    """Of the spec: codec, `min_cosine`, `silence`, outer optimizer."""
    every: int
    """Steps between two outer states that every island stores."""
    corpus: str
    """Digest of the documents; empty for a run that trains on rollouts."""
    client: IslandClient
    store: ShareStore
    fetcher: ShareFetcher
    stop: threading.Event
    """Set when this process is told to end."""
    log: logging.Logger
    _outer: tuple[int, OuterState] | None = None
    """The newest outer state, with its version."""
    _announced: int = -1
    """Version of the last outer state that was stored."""

    def hold(self, version: int, outer: OuterState, *, store: bool) -> None:
        """Take the newest outer state, and store it now or when a wait is long.

        Raises:
            UserError: the store cannot be written.
        """
        self._outer = version, outer
        if store:
            self.publish()

    def publish(self) -> None:
        """Store the newest outer state for islands that join; remove what nobody needs any more.

        Raises:
            UserError: the store cannot be written.
        """
        assert self._outer is not None, "`hold` was called"
        version, outer = self._outer
        try:
            if version != self._announced:
                self.store.put_outer(version, outer.theta, outer.momentum)
        except AlreadyPublished as there:
            raise UserError(
                f"the outer state of version {version} was published with other contents",
                place=there.place,
                remedy=REJOIN,
            ) from there
        self._announced = version
        self.store.keep(self._kept_since(version))
        self.client.announce(self.url, version, outer.digest)

    def can_follow(self, version: int) -> bool:
        """Return whether all shares are left that the records since a version name.

        Shares of others are removed in time; this island's own may be lost with its disk.
        """
        step = version
        while (record := self._record(step)) is not None:
            own = [each for each in record.contributors if each.island == self.island]
            data = self.store.share(step) if own else None
            if own and (data is None or digest_bytes(data) != own[0].share):
                return False
            step += 1
        return step == version or not self._removed(version)

    def fetch_outer(self) -> tuple[int, OuterState]:
        """Return the newest outer state that another island has stored, and its version.

        Raises:
            Stopped: this process was told to end before there was one.
            BadObject: it is not the one that was announced.
        """
        begun, report_at = time.monotonic(), REPORT_EVERY_S
        while True:
            states = self.client.outer_states()
            # An island that has not noticed a rollback may still announce another version.
            left = range(states.oldest, states.committed + 1)
            found = [each for each in states.stored if each.version in left]
            for each in sorted(found, key=lambda each: -each.version):
                if each.island == self.island or not self.can_follow(each.version):
                    continue
                if (outer := self._try_outer(each)) is not None:
                    return each.version, outer
            if self.stop.wait(1.0):
                raise Stopped
            waited = time.monotonic() - begun
            if waited >= report_at:
                self.log.info("%.0f s waiting for an island that has the outer state", waited)
                report_at = waited + REPORT_EVERY_S

    def _try_outer(self, stored: StoredOuter) -> OuterState | None:
        """Return an outer state; None if its server does not give it soon."""
        try:
            theta, momentum = self.fetcher.fetch_outer(stored, self.size, ATTEMPT_S)
        except BadObject:
            raise
        except UserError as error:
            self.log.warning("trying another island: %s", error)
            return None
        return OuterState(np.array(theta), np.array(momentum))

    def misfit(self, version: int, outer: OuterState, *, offered: bool) -> str:
        """Return why a full state does not fit what the coordinator has; empty if it does.

        It does not after a rollback, or where one of the two was restored from a copy.

        Args:
            version: of the outer state.
            outer: that state.
            offered: whether the full state says that the share of step `version` was offered.
        """
        states = self.client.outer_states()
        if version > states.committed:
            return f"only {states.committed} steps are committed"
        recorded = self.client.result_of(version - 1) if version else None
        if recorded is not None and recorded != outer.digest:
            return f"the others have another outer state of version {version}"
        if version < states.oldest:
            return f"records before step {states.oldest} are not served any more"
        if offered and version == states.committed:
            answer = self.client.record(version, 0.0)
            if not isinstance(answer, Committed) and self.island not in answer.offered:
                return f"the coordinator has no share of step {version} that it would count"
        return ""

    def forget(self, version: int) -> None:
        """Remove what this island stored of a history that is not the run's.

        Shares of committed steps before it stay: the others may need them.

        Args:
            version: of the full state that does not fit.
        """
        self.store.remove_from(min(version, self.client.outer_states().committed))

    def _kept_since(self, version: int) -> int:
        """The version since which an island that stores an outer state keeps everything."""
        return max(0, version // self.every - KEPT_PERIODS) * self.every

    def _removed(self, step: int) -> bool:
        """Return whether another island has removed its share of a step."""
        stored = self.client.outer_states().stored
        return any(step < self._kept_since(e.version) for e in stored if e.island != self.island)

    def _record(self, step: int) -> CommitRecord | None:
        answer = self.client.record(step, 0.0)
        return answer.record if isinstance(answer, Committed) else None
