"""Samples follow the model's own forward pass, and right answers are counted as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.execution import Execution
from learner_jax.model import abstract_params, bind, init_params
from learner_jax.sampling import sample, sampled_right
from learner_jax.sharding import make_mesh, shard_params
from learner_jax.warm_start import model_config
from tests.learner_jax.test_warm_start import spec_with
from verify.plugins import Trace

END, NEW = 7, 12
PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3], [5], [8, 9, 7], [9, 3], [2], [3, 8], [4, 6, 2, 6]]


@pytest.fixture(scope="module")
def model():
    short = [{**spec_with().samplers[0].model_dump(), "max_new_tokens": NEW}]
    spec = spec_with(seed=3, samplers=short)
    config = model_config(spec)
    params = init_params(config, jax.random.key(0))
    # with weights this large the tokens before decide what follows
    params = jax.tree.map(lambda x: 6 * x, params)
    return spec, config, shard_params(params, abstract_params(config), make_mesh(spec.learner.mesh))


@pytest.fixture(scope="module")
def outputs(model):
    spec, config, params = model
    return list(sample(spec, config, params, PROMPTS, END))


def test_each_token_is_drawn_from_a_forward_pass_over_those_before(model, outputs):
    spec, config, params = model
    key, rows = jax.random.key(spec.seed), spec.learner.packing.rows
    assert len(outputs) == len(PROMPTS) > rows
    for begin in range(0, len(PROMPTS), rows):
        key, now = jax.random.split(key)
        for row, (prompt, output) in enumerate(
            zip(PROMPTS[begin : begin + rows], outputs[begin : begin + rows], strict=True)
        ):
            # when the whole output is computed at once, in a row of its own
            tokens = jnp.array([[*prompt, *output]])
            policy = bind(config, params)
            positions = jnp.arange(tokens.shape[1])[None]
            hidden = policy(tokens, jnp.ones_like(tokens), positions, Execution(jnp.float32))
            logits = np.asarray(hidden[0] @ policy.head_weight())[len(prompt) - 1 : -1]
            # then each token wins the race of its logits with the noise of its step and row
            for step, (token, values) in enumerate(zip(output, logits, strict=True)):
                noise = jax.random.gumbel(jax.random.fold_in(now, step), (rows, len(values)))[row]
                assert token == int(jnp.argmax(values + noise))
    # and an output ends at its end token or at the limit
    assert all(len(output) == NEW or output[-1] == END for output in outputs)
    assert all(END not in output[:-1] for output in outputs)


def test_an_answer_counts_where_it_is_the_traces_behind_the_first_think_end(model, outputs):
    spec, config, params = model

    class Known:
        """Traces whose answers are the ends of what the model samples, every other one changed."""

        eos_token_id = END

        def traces(self, rng, count, split):
            changed = [[*output[:-1], output[-1] + (i % 2)] for i, output in enumerate(outputs)]
            ends = [max(1, len(output) - 3) for output in outputs]
            return [Trace(*each) for each in zip(PROMPTS, changed, ends, strict=True)]

    begins = [max(1, len(output) - 3) - 1 for output in outputs]
    right = [
        i % 2 == 0 and output[at] not in output[:at]
        for i, (output, at) in enumerate(zip(outputs, begins, strict=True))
    ]
    assert 0 < sum(right) < len(right) / 2 + 1
    assert sampled_right(spec, config, params, Known(), "train") == np.mean(right)
