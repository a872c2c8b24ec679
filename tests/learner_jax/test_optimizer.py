"""AdamW as its paper writes it, the warm-up, the clip."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax

from learner_jax.optimizer import learning_rate, make_optimizer
from runspec.spec.schema import Optimizer


def test_warm_up_is_linear_then_constant() -> None:
    schedule = learning_rate(4.0, warmup_updates=4)
    assert [float(schedule(n)) for n in range(6)] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert float(learning_rate(4.0, warmup_updates=0)(0)) == 4.0


def test_updates_are_those_of_adamw_after_the_clip() -> None:
    # given settings where every part shows, and gradients above and below the clip
    spec = Optimizer(
        lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, clip_norm=1.0, warmup_updates=2
    )
    gradients = [np.array([3.0, -4.0]), np.array([0.3, 0.1]), np.array([-6.0, 8.0])]
    # when applied
    optimizer = make_optimizer(spec)
    params = jnp.array([1.0, -2.0])
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(jnp.asarray(gradient), state, params)
        params = optax.apply_updates(params, updates)
    # then they are Algorithm 2 of arXiv 1711.05101 on clipped gradients
    theta, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient / max(1.0, np.linalg.norm(gradient))
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        step = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
        theta = theta - 0.1 * min(1.0, t / 2) * (step + 0.2 * theta)
    np.testing.assert_allclose(params, theta, rtol=1e-6)
