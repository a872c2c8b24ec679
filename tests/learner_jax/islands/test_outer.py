"""The outer optimizer against optax's, the weighted mean, and error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import optax
import pytest
from blake3 import blake3

from bridge.codecs import SEGMENT, Kind, codec
from learner_jax.islands.outer import OuterState, encode_share, outer_update, weighted_mean

N = 1000


@dataclass(frozen=True)
class Outer:
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True


def vectors(count: int, seed: int = 0, n: int = N) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).standard_normal((count, n)).astype(np.float32))


@pytest.mark.parametrize(
    ("lr", "momentum", "nesterov"), list(product([0.7, 1.0], [0.0, 0.9], [True, False]))
)
def test_the_outer_update_is_optax_sgd(lr: float, momentum: float, nesterov: bool) -> None:
    # given twenty pseudo-gradients
    theta, *gradients = vectors(21)
    rule = optax.sgd(lr, momentum, nesterov)
    params, moments = theta, rule.init(theta)
    state = OuterState.initial(theta)
    for gradient in gradients:
        # when both make their updates
        updates, moments = rule.update(gradient, moments, params)
        params = optax.apply_updates(params, updates)
        state = outer_update(state, gradient, Outer(lr, momentum, nesterov))
        # then the parameters are the same
        assert state.theta.dtype == state.momentum.dtype == np.float32
        np.testing.assert_allclose(state.theta, params, rtol=1e-6, atol=1e-6 * np.abs(params).max())


def test_an_update_leaves_the_state_before_it_as_it_was() -> None:
    theta, gradient = vectors(2)
    state = OuterState.initial(theta.copy())
    outer_update(state, gradient, Outer())
    np.testing.assert_array_equal(state.theta, theta)
    assert not state.momentum.any()


def test_segments_do_not_show() -> None:
    # given vectors longer than a segment
    theta, *shares = vectors(3, n=SEGMENT + N)

    def step(part: slice) -> OuterState:
        mean = weighted_mean((share[part] for share in shares), [1.0, 2.0])
        state = outer_update(OuterState.initial(theta[part]), mean, Outer())
        return outer_update(state, mean, Outer())

    # then the second segment is as it is alone
    whole, alone = step(slice(None)), step(slice(SEGMENT, None))
    np.testing.assert_array_equal(whole.theta[SEGMENT:], alone.theta)
    np.testing.assert_array_equal(whole.momentum[SEGMENT:], alone.momentum)


def test_the_digest_is_of_theta_then_the_momentum() -> None:
    theta, momentum = vectors(2)
    expected = blake3(theta.tobytes() + momentum.tobytes()).hexdigest()
    assert OuterState(theta, momentum).digest == expected
    assert OuterState(momentum, theta).digest != expected


def test_the_mean_is_weighted_in_float32_and_in_the_order_given() -> None:
    shares, weights = vectors(3), [1.0, 5.0, 3.0]
    mean = weighted_mean(iter(shares), weights)
    # then it is that of float64 within rounding, and its bits are those of this order
    assert mean.dtype == np.float32
    expected = np.average(np.array(shares, np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(mean, expected, atol=1e-6)
    parts = [share * np.float32(weight / 9) for share, weight in zip(shares, weights, strict=True)]
    np.testing.assert_array_equal(mean, (parts[0] + parts[1]) + parts[2])


def test_the_mean_of_one_is_itself_and_the_shares_stay_as_they_are() -> None:
    (share,) = vectors(1)
    kept = share.copy()
    mean = weighted_mean([share], [7.3])
    np.testing.assert_array_equal(mean, share)
    mean += 1
    np.testing.assert_array_equal(share, kept)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, float("nan")], [1.0], [1.0] * 3])
def test_weights_that_make_no_mean_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError):
        weighted_mean(vectors(2), weights)


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_share_without_feedback_is_the_delta_alone(kind: Kind) -> None:
    each, (delta,) = codec(kind), vectors(1)
    data, residual, norm = encode_share(each, delta, None)
    assert data == each.encode(delta) and residual is None
    assert norm == pytest.approx(np.linalg.norm(each.decode(data, N).astype(float)))


@pytest.mark.parametrize("kind", ["int8", "int4", "sparse"])
def test_what_a_share_lost_is_in_the_next(kind: Kind) -> None:
    each, (delta, before) = codec(kind), vectors(2)
    # given a residual
    kept = delta.copy(), before.copy()
    data, residual, norm = encode_share(each, delta, before)
    # then the share is of the sum, with the codec's decay
    wanted = delta + before * np.float32(each.feedback)
    assert data == each.encode(wanted)
    decoded = each.decode(data, N)
    np.testing.assert_array_equal(residual, wanted - decoded)
    assert norm == pytest.approx(np.linalg.norm(decoded.astype(float)))
    # and the arguments are as they were
    np.testing.assert_array_equal(delta, kept[0])
    np.testing.assert_array_equal(before, kept[1])


@pytest.mark.parametrize("kind", ["int8", "int4", "sparse"])
def test_with_feedback_the_shares_add_up_to_the_deltas(kind: Kind) -> None:
    # given the same pseudo-gradient at each of many steps
    each, (delta,) = codec(kind), vectors(1, n=8192)
    steps, residual, total = 300, None, np.zeros(8192)
    for _ in range(steps):
        data, residual, _ = encode_share(each, delta, residual)
        total += each.decode(data, 8192)
    # then their mean comes near it; of a sparse share a part of what it leaves out decays
    error = np.linalg.norm(total / steps - delta) / np.linalg.norm(delta)
    assert error < {"int8": 1e-4, "int4": 1e-3, "sparse": 0.6}[kind]
