"""Log-probs and entropies: the softmax of all logits, and its gradients.

What exists of logits, and what a mesh sends, is in test_gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.logprobs import token_logprobs
from runspec.core.models.memory import KEPT_LOGITS

B, T, D, V = 2, 13, 8, 19


def arrays(*, holes: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states, head and targets; with holes, most positions have no target."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, V, (B, T))
    if holes:
        targets[0, :9] = targets[1, ::2] = -1
    return rng.normal(size=(B, T, D)), rng.normal(size=(D, V)), targets


def whole(hidden: Any, head: Any, targets: Any, temperature: float) -> tuple[Any, Any]:
    """The formula on all logits at once."""
    table = jax.nn.log_softmax(hidden @ head / temperature)
    chosen = jnp.take_along_axis(table, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    entropy = -(jnp.exp(table) * table).sum(-1)
    return jnp.where(targets >= 0, chosen, 0.0), jnp.where(targets >= 0, entropy, 0.0)


def objective(function: Any, hidden: Any, head: Any) -> tuple[jax.Array, Any]:
    """A number that depends on both results in a different way at each position; and both."""
    logprobs, entropy = function(hidden, head)
    return jnp.sum(logprobs * jnp.cos(logprobs) + entropy**2), (logprobs, entropy)


def differentiated(function: Any, hidden: Any, head: Any) -> tuple[Any, Any]:
    """Gradients by hidden states and head; log-probs and entropies."""
    gradient = jax.grad(partial(objective, function), (0, 1), has_aux=True)
    return jax.jit(gradient)(jnp.asarray(hidden), jnp.asarray(head))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "holes", "kept", "temperature"),
    [
        (None, True, True, 0.6),
        (4, True, False, 0.9),
        (13, False, True, 1.0),
        (1, False, False, 0.6),
    ],
)
def test_values_and_gradients_are_those_of_the_whole_softmax(
    chunk: int | None, holes: bool, kept: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given chunks whose logits are kept for the backward pass, or computed again
    monkeypatch.setattr("learner_jax.logprobs.KEPT_LOGITS", KEPT_LOGITS if kept else 0)
    hidden, head, targets = arrays(holes=holes)
    with jax.enable_x64(True):
        # when differentiated, and differentiated by JAX through the whole table
        found, expected = (
            differentiated(partial(each, targets=targets, temperature=temperature), hidden, head)
            for each in (partial(token_logprobs, chunk=chunk), whole)
        )
    # then values and gradients agree
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 1e-10 * np.linalg.norm(b)


def test_large_logits_keep_their_precision() -> None:
    # given logits a thousand apart and two that nearly tie
    logits = np.array([[[1000.0, 999.5, -1000.0]]], np.float32)
    logprobs, entropy = token_logprobs(
        logits, jnp.eye(3, dtype=jnp.float32), np.array([[1]]), temperature=1.0
    )
    # then the common part has cancelled
    share = 1 / (1 + np.exp(0.5))
    np.testing.assert_allclose(logprobs, [[np.log(share)]], rtol=1e-6)
    expected = -share * np.log(share) - (1 - share) * np.log(1 - share)
    np.testing.assert_allclose(entropy, [[expected]], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_positions_without_a_target_count_nothing_whatever_is_there(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given logits whose exponential is no float32, at positions that share a chunk with targets
    monkeypatch.setattr("learner_jax.logprobs.KEPT_LOGITS", KEPT_LOGITS if kept else 0)
    hidden, head, targets = (x.astype(np.float32) for x in arrays(holes=True))
    targets = targets.astype(int)
    nowhere = targets < 0
    large = np.where(nowhere[..., None], 1000.0 * hidden, hidden)
    function = partial(token_logprobs, targets=targets, temperature=0.6)
    # when differentiated
    found, expected = (differentiated(function, states, head) for states in (large, hidden))
    # then they add nothing, not even 0 * inf
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    # and they score 0, also where hidden states are not finite
    hidden[nowhere] = np.nan
    for scores in (*found[1], *function(hidden, head)):
        assert not np.asarray(scores)[nowhere].any() and np.isfinite(scores).all()
    # and no target at all is no gradient
    none = partial(token_logprobs, targets=np.full_like(targets, -1), temperature=1.0)
    assert not any(x.any() for x in jax.tree.leaves(differentiated(none, arrays()[0], head)))


@pytest.mark.slow
def test_bfloat16_states_sum_the_gradient_of_the_head_in_float32() -> None:
    # given a float32 head used in bfloat16, and many chunks
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 128, D)), jnp.bfloat16)
    targets = rng.integers(0, V, (1, 128))
    head = jnp.asarray(rng.normal(size=(D, V)), jnp.float32)

    def value(head: jax.Array, chunk: int) -> jax.Array:
        return token_logprobs(hidden, head, targets, temperature=1.0, chunk=chunk)[0].sum()

    # when summed over 128 chunks or one
    many, one = (jax.jit(jax.grad(partial(value, chunk=n)))(head) for n in (1, 128))
    # then it is float32 and no more is lost on the way
    assert many.dtype == jnp.float32
    np.testing.assert_allclose(many, one, rtol=0, atol=1e-4 * float(jnp.abs(one).max()))
