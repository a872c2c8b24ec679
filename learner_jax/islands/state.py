"""State of an island between steps, and how it follows the commits: plain data, no network.

With `overlap: 0` an island ends a step s in two moves: `sent`, when it has encoded its share, and
`committed`, when the record names the shares that count. With `overlap: 1` it trains step s + 1
between the two. Both moves are functions of the record. So a replay ends with the same bits.

    theta_s           outer parameters of version s, the same bits on every island
    p_s               the island's own parameters when it sent its share of step s
    share of step s   theta_s - p_s, plus what the codec left out before
    committed         parameters += theta_(s+1) - p_s

An island whose share does not count in a step has trained that step in vain. It goes on from
theta_(s+1) with zero moments, as an island that has just joined does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from bridge.codecs import Codec
from learner_jax.islands.outer import OuterState, encode_share
from runspec.core.run_files import SENT_NAME

Flat = np.ndarray
"""A model's weights as one float32 vector (`bridge.flat.FlatLayout`)."""


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
