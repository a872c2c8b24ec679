"""The outer optimizer of learner islands (OpenDiLoCo, arXiv 2407.07852), in numpy on the host.

An island starts a step at the outer parameters theta_s and ends it at p. With the pseudo-gradients
delta_i = theta_s - p of the islands, their weights w_i, the rate lr and the momentum mu:

    g = sum_i (w_i / sum w) delta_i
    m = mu m + g
    u = g + mu m  (Nesterov)  or  m
    theta_{s+1} = theta_s - lr u

Every operation is one of IEEE 754 on single elements, in a fixed order, so that islands of any
hardware hold the same bits. Vectors are those of `bridge.flat`: float32 [n] in a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from blake3 import blake3

from bridge.codecs import SEGMENT, Codec
from bridge.tensors import tensor_bytes
from runspec.core.spec.schema import Outer


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
        for where in _segments(len(share)):
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
    for where in _segments(len(theta)):
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
            for where in _segments(len(rest)):
                rest[where] += residual[where] * np.float32(codec.feedback)
    data = codec.encode(rest)
    squares = 0.0
    for where, part in codec.parts(data, len(rest)):
        squares += float(np.square(part, dtype=np.float64).sum())
        if codec.feedback:
            rest[where] -= part
    return data, rest if codec.feedback else None, math.sqrt(squares)


def _segments(n: int) -> Iterable[slice]:
    return (slice(start, start + SEGMENT) for start in range(0, n, SEGMENT))
