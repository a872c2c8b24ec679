"""The decoder: no sample sees another, padding is inert; its numbers are in test_families."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.weight_map import weight_map
from learner_jax.execution import Execution
from learner_jax.model import abstract_lora, abstract_params, bind, init_params
from learner_jax.packing import Sample, pack
from learner_jax.sharding import make_mesh
from learner_jax.step import build_programs
from learner_jax.warm_start import model_config
from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.models.decoder import hf_config
from runspec.core.models.family import parse_config
from runspec.core.models.parameters import lora_parameters, parameters
from runspec.core.spec.schema import Lora
from tests.learner_jax.conftest import tiny_spec

LENGTHS = ((3, 4), (1, 9), (6, 2), (5, 5))


@partial(jax.jit, static_argnames="config")
def logits_of(params: Any, config: ModelConfig, batch: Any) -> jax.Array:
    policy = bind(config, params)
    hidden = policy(
        batch.tokens,
        batch.segment_ids,
        batch.positions,
        Execution(jnp.float32),
    )
    return hidden @ policy.head_weight()


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
        part = params["layers"]["attention" if name in "qo" else "mlp"][name]
        assert float(part["weight"].std()) == pytest.approx(std, rel=0.05), name
    assert float(params["embed"].std()) == pytest.approx(1 / 8, rel=0.05)
    assert not params["layers"]["attention"]["q"]["bias"].any()
    assert (params["final_norm"]["weight"] == 1).all()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("flags", list(product([False, True], repeat=4)), ids=str)
def test_the_module_is_as_its_table_says(family: str, flags: tuple[bool, ...]) -> None:
    # given a config of every combination of flags, in sizes that all differ
    tied, qkv_bias, output_bias, qk_norm = flags
    config = ModelConfig(
        family, 11, 12, 13, 2, 6, 3, 8, 64, 1e4, 1e-6, tied, qkv_bias, output_bias, qk_norm
    )
    # then shapes, logical axes and initial values are those of the table, of adapters too
    assert abstract_params(config) == parameters(config)
    lora = Lora(rank=5)
    assert abstract_lora(config, lora) == lora_parameters(config, lora)
    # and the weight map has every leaf once
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    entries = {entry.path: entry.leaf_shape for entry in weight_map(config)}
    assert entries == {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}


def test_rows_longer_than_the_model_is_exact_for_are_refused() -> None:
    # given a Mistral with a window shorter than the rows of a run
    spec = tiny_spec()
    config = replace(model_config(spec), model_type="mistral", sliding_window=63)
    # when its programs are built, then the row is named
    with pytest.raises(UserError, match=r"learner\.packing\.tokens: 64 tokens in a row"):
        build_programs(spec, config, make_mesh(spec.learner.mesh))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_a_shape_of_every_family_is_a_model_of_it(family: str) -> None:
    # given a spec whose model is a shape, with heads of a size of their own
    spec = tiny_spec()
    shape = spec.model.shape.model_copy(update={"model_type": family, "head_dim": 6})
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"shape": shape})})
    # when its config is made
    config = model_config(spec)
    # then it has the family's biases and norms, no window, and a config.json that is read back
    assert (config.qkv_bias, config.qk_norm) == (family == "qwen2", family == "qwen3")
    assert (config.head_dim, config.exact_length) == (6, None)
    written = hf_config(config, dtype="float32", eos_token_id=1, pad_token_id=0)
    assert parse_config(written, place="config.json") == config
