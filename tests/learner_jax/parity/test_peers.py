"""Losses, advantages and the vocabulary head equal TRL's and Tunix's where they compute the same.

Against recorded vectors (`python -m benchmarks.peers record DIR` makes them anew), and against the
peers themselves where RUNSPEC_PEERS names their environments. They compute something else here:

- TRL's advantages divide by std + 1e-4, ours and Tunix's by std + 1e-6.
- TRL multiplies the k3 term by the ratio, unless `use_bias_correction_kl` is off.
- TRL's entropy bonus is a mean over tokens whatever normalises the loss; ours follows the loss.
- TRL's CISPO bounds the ratio only above, by epsilon_high itself; ours by 1 + eps_high, and below
  by 1 - eps_low.
- Tunix's GSPO takes the per-token form; one advantage a sequence makes the gradients the same.
- Tunix reports the entropy and never adds it to GRPO's loss.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.peers import PEERS, computed, python_of
from benchmarks.peers.given import TRL_LOSSES, TUNIX_LOSSES, VECTORS, make_given
from learner_jax.batch import group_advantages
from learner_jax.logprobs import token_logprobs
from learner_jax.loss import grpo_loss, token_weights
from learner_jax.packing import LossInputs
from runspec.core.schema import Grpo

RECORDED = json.loads(VECTORS.read_text())
GIVEN = RECORDED["given"]
FLOAT32, TOLERANCE = 2e-6, {"trl": 1e-10, "tunix": 2e-6}
"""Relative. Tunix computes all in float32, TRL its head and its advantages."""

CLIP: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.28, "delta": None}
K3: dict[str, Any] = {"coef": 0.3}
OURS: dict[str, dict[str, Any]] = {
    "sequence": {"loss_normalizer": "sequence"},
    "sequence, delta": {"loss_normalizer": "sequence", "clip": {**CLIP, "delta": 4.0}},
    "sequence, k3": {"loss_normalizer": "sequence", "kl": K3},
    "token": {"loss_normalizer": "token"},
    "token, entropy": {"loss_normalizer": "token", "entropy_coef": 0.2},
    "token, as DAPO": {"loss_normalizer": "token", "clip": {**CLIP, "delta": 4.0}, "kl": K3},
    "constant": {"loss_normalizer": "constant", "kl": K3},
    "token, CISPO": {
        "loss_normalizer": "token",
        "surrogate": "cispo",
        "clip": {"eps_low": 1.0, "eps_high": 1.5},
        "kl": K3,
    },
    "sequence, GSPO": {"loss_normalizer": "sequence", "ratio": "sequence"},
    "token, GSPO": {
        "loss_normalizer": "token",
        "ratio": "sequence",
        "clip": {**CLIP, "delta": 1.5},
        "kl": K3,
    },
}
ANOTHER_FORMULA = {"sequence, k3 times r"}


def loss_and_gradients(name: str) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Ours on the given arrays, in float64, each sequence in a row of its own."""
    settings = {"clip": CLIP, "kl": {"coef": 0.0}, "entropy_coef": 0.0, **OURS[name]}
    algorithm = Grpo.model_validate(settings)
    mask = np.array(GIVEN["mask"])
    per_token = token_weights(
        mask.sum(-1).tolist(), algorithm.loss_normalizer, max_new_tokens=GIVEN["max_new_tokens"]
    )
    with jax.enable_x64(True):
        logprobs, entropy, old, ref = (
            jnp.asarray(GIVEN[name]) for name in ("logprobs", "entropy", "old", "ref")
        )
        inputs = LossInputs(
            weights=jnp.asarray(mask * np.array(per_token)[:, None]),
            advantages=jnp.asarray(mask * np.array(GIVEN["advantages"])[:, None]),
            old_logprobs=old,
            sampler_logprobs=old,
            ref_logprobs=ref if algorithm.kl.coef else None,
        )

        def loss(logprobs: jax.Array, entropy: jax.Array) -> jax.Array:
            return grpo_loss(logprobs, entropy, jnp.asarray(mask), inputs, algorithm)[0]

        return jax.value_and_grad(loss, (0, 1))(logprobs, entropy)


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(found - expected) <= tolerance * max(np.linalg.norm(expected), 1e-3)


def check_losses(peer: str, theirs: dict[str, Any]) -> None:
    for name in sorted(theirs["losses"].keys() - ANOTHER_FORMULA):
        loss, (by_logprob, by_entropy) = loss_and_gradients(name)
        expected = theirs["losses"][name]
        assert_close(loss, expected["loss"], TOLERANCE[peer])
        assert_close(by_logprob, expected["by_logprob"], TOLERANCE[peer])
        if peer == "trl":
            assert_close(by_entropy, expected["by_entropy"], TOLERANCE[peer])


def check_head(_: str, theirs: dict[str, Any]) -> None:
    targets, weight_p, weight_h = (np.array(GIVEN[name]) for name in ("targets", "a", "b"))
    for temperature, expected in theirs["head"].items():

        def results(hidden: Any, head: Any, temperature: str = temperature) -> Any:
            return token_logprobs(hidden, head, targets, temperature=float(temperature), chunk=3)

        def objective(hidden: Any, head: Any, function: Any = results) -> jax.Array:
            logprobs, entropy = function(hidden, head)
            return jnp.sum(weight_p * logprobs + weight_h * entropy)

        with jax.enable_x64(True):
            arrays = jnp.asarray(GIVEN["hidden"]), jnp.asarray(GIVEN["head"])
            found = dict(zip(("logprobs", "entropy"), results(*arrays), strict=True))
            gradients = jax.grad(objective, (0, 1))(*arrays)
            found |= dict(zip(("by_hidden", "by_head"), gradients, strict=True))
        for name, values in expected.items():
            assert_close(found[name], values, FLOAT32)


def check_advantages(peer: str, theirs: dict[str, Any]) -> None:
    rewards = np.array(GIVEN["rewards"])
    ours = partial(group_advantages, rewards, np.zeros_like(rewards), rewards)
    scaled = ours(normalize="std")
    if peer == "trl":  # with another epsilon
        std = rewards.std(axis=-1, ddof=1, keepdims=True)
        scaled = scaled * (std + 1e-6) / (std + 1e-4)
        assert_close(theirs["advantages"]["none"], ours(normalize="none"), FLOAT32)
    assert_close(theirs["advantages"]["group"], scaled, FLOAT32)


CHECKS = [check_losses, check_head, check_advantages]


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("peer", PEERS)
def test_ours_equal_what_the_peer_computed(peer, check):
    check(peer, RECORDED[peer])


def test_the_recorded_arrays_are_those_of_the_recorder():
    assert json.loads(json.dumps(make_given())) == GIVEN
    assert set(TRL_LOSSES) - ANOTHER_FORMULA == set(OURS)
    assert set(TUNIX_LOSSES) <= set(OURS)


@pytest.mark.nightly
@pytest.mark.parametrize("peer", PEERS)
def test_ours_equal_the_peer_itself(peer):
    if python_of(peer) is None:
        pytest.skip("RUNSPEC_PEERS names no environment of it")
    # when the installed peer computes anew
    theirs = computed(peer, GIVEN)
    # then ours are the same, and so is what was recorded
    for check in CHECKS:
        check(peer, theirs)
    assert theirs["version"] == RECORDED[peer]["version"]
