"""The decoder: no sample sees another, padding is inert; its numbers are in test_families."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.weight_map import weight_map
from learner_jax.execution import Execution
from learner_jax.leaves import leaf_at
from learner_jax.model import abstract_params, final_hidden, head_weight, init_params
from learner_jax.packing import Sample, pack
from learner_jax.sharding import make_mesh
from learner_jax.step import build_programs
from learner_jax.warm_start import model_config
from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig, hf_config, parse_config
from runspec.core.models.named_models import model_names, named_model
from tests.learner_jax.conftest import tiny_spec

LENGTHS = ((3, 4), (1, 9), (6, 2), (5, 5))


@partial(jax.jit, static_argnames="config")
def logits_of(params: Any, config: ModelConfig, batch: Any) -> jax.Array:
    hidden = final_hidden(
        params,
        config,
        batch.tokens,
        batch.segment_ids,
        batch.positions,
        Execution(jnp.float32),
    )
    return hidden @ head_weight(params)


def samples_of(vocab: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [Sample(rng.integers(0, vocab, p), rng.integers(0, vocab, n)) for p, n in LENGTHS]


def test_packing_changes_neither_logits_nor_gradients() -> None:
    # given the same samples packed together and one a row
    config = ModelConfig("qwen2", 23, 16, 24, 2, 2, 1, 8, 64, 1e4, 1e-6, False, True)
    params = init_params(config, jax.random.key(0))
    samples = samples_of(23)
    together = pack(samples, tokens=40, rows=1)
    alone = pack(samples, tokens=12, rows=4)

    def value(params: Any, batch: Any, on: Any) -> jax.Array:
        return jnp.sum(logits_of(params, config, batch) ** 2 * on[..., None])

    # when the same value of their output positions is computed
    found = [
        jax.jit(jax.value_and_grad(value))(
            params, packed.token_batch(0), packed.scatter([1.0] * 4)[0]
        )
        for packed in (together, alone)
    ]
    # then value and gradients agree
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)


def test_padding_is_finite_and_has_no_gradient() -> None:
    # given a row that is half padding, and a row of nothing else
    config = ModelConfig("qwen2", 23, 16, 24, 2, 2, 1, 8, 64, 1e4, 1e-6, False, True)
    params = init_params(config, jax.random.key(0))
    packed = pack([Sample(np.array([1, 2]), np.array([3, 4]))], tokens=8, rows=2)
    batch, on = packed.token_batch(0), packed.scatter([1.0])[0]

    def value(params: Any, tokens: Any) -> jax.Array:
        return jnp.sum(logits_of(params, config, replace(batch, tokens=tokens)) * on[..., None])

    # when other tokens stand in the padding
    other = np.where(batch.segment_ids == 0, 7, batch.tokens)
    gradient = jax.jit(jax.grad(value))
    grads = [gradient(params, tokens) for tokens in (batch.tokens, other)]
    # then logits are finite and the gradients are the same and finite
    assert np.isfinite(logits_of(params, config, batch)).all()
    jax.tree.map(np.testing.assert_array_equal, *grads)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads[0]))
    assert not grads[0]["embed"][7].any()


def test_initial_parameters_have_the_scales_of_the_recipe() -> None:
    # given a model large enough to measure a scale
    config = ModelConfig("qwen2", 300, 64, 100, 2, 4, 2, 16, 64, 1e4, 1e-6, False, True)
    # when it is initialised
    params = init_params(config, jax.random.key(0))
    # then each scale is as said
    expected = {"q": 64**-0.5, "gate": 64**-0.5, "o": 0.1 * 64**-0.5, "down": 0.1 * 100**-0.5}
    for name, std in expected.items():
        assert float(params["layers"][name].std()) == pytest.approx(std, rel=0.05), name
    assert float(params["embed"].std()) == pytest.approx(1 / 8, rel=0.05)
    assert not params["layers"]["q_bias"].any() and (params["final_norm"] == 1).all()
    # and every array is as the abstract tree says
    shapes = jax.tree.map(lambda spec: spec.shape, abstract_params(config))
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, params)


@pytest.mark.parametrize("name", model_names())
def test_the_tree_of_a_named_model_is_that_of_the_map(name: str) -> None:
    # given the config that ships
    config = parse_config(named_model(name) or {}, place=name)
    # when the tree is described, then it has the leaves of the weight map and no others
    abstract = abstract_params(config)
    entries = weight_map(config)
    for entry in entries:
        spec = leaf_at(abstract, entry.path)
        assert spec.shape == entry.leaf_shape
        assert len(spec.axes) == len(spec.shape)
    assert len(jax.tree.leaves(abstract)) == len(entries)


def test_rows_longer_than_the_model_is_exact_for_are_refused() -> None:
    # given a Mistral with a window shorter than the rows of a run
    spec = tiny_spec()
    config = replace(model_config(spec), model_type="mistral", sliding_window=63)
    # when its programs are built, then the row is named
    with pytest.raises(UserError, match=r"learner\.packing\.tokens: 64 tokens in a row"):
        build_programs(spec, config, make_mesh(spec.learner.mesh))


@pytest.mark.parametrize(
    ("family", "leaves"),
    [
        ("qwen2", {"q_bias", "k_bias", "v_bias"}),
        ("qwen3", {"q_norm", "k_norm"}),
        ("llama", set()),
        ("mistral", set()),
    ],
)
def test_a_shape_of_every_family_is_a_model_of_it(family: str, leaves: set[str]) -> None:
    # given a spec whose model is a shape, with heads of a size of their own
    spec = tiny_spec()
    shape = spec.model.shape.model_copy(update={"model_type": family, "head_dim": 6})
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"shape": shape})})
    # when its config is made
    config = model_config(spec)
    # then it has the family's arrays, no window, and a config.json that is read back
    common = {"attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down"}
    assert abstract_params(config)["layers"].keys() == common | leaves
    assert (config.head_dim, config.exact_length) == (6, None)
    written = hf_config(config, dtype="float32", eos_token_id=1, pad_token_id=0)
    assert parse_config(written, place="config.json") == config
