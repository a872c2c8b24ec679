"""The jitted programs together: policy versions as bits, donation, one update, refusals."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint import v1 as ocp

from learner_jax.leaves import HostLeaves, leaf_at
from learner_jax.loss import token_weights
from learner_jax.model import abstract_params, init_params
from learner_jax.optimizer import HOST_MEMORY
from learner_jax.packing import LossInputs, Packed, Sample, TokenBatch, pack
from learner_jax.sharding import make_mesh, shard_batch, shard_params
from learner_jax.step import Accumulated, Programs, TrainState, build_programs
from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import Lora, Mesh, Packing
from tests.learner_jax.conftest import changed, tiny_spec, updates_made

CONFIG = ModelConfig("qwen2", 32, 16, 24, 2, 2, 1, 8, 64, 1e4, 1e-6, False, True)
LR, CLIP_NORM = 1e-2, 0.01
LORA = Lora(rank=3, alpha=6.0, targets=["q", "down"])


@dataclass
class Bench:
    """Programs with a state and one packed batch of six samples."""

    mesh: jax.sharding.Mesh
    programs: Programs
    state: TrainState
    packed: Packed

    @property
    def tokens(self) -> TokenBatch:
        return shard_batch(self.packed.batch, self.mesh)

    def scores(self, params: Any) -> list[np.ndarray]:
        """Log-probs of each sample's output tokens."""
        scores = self.programs.score(params, self.tokens, self.packed.microbatches)
        return self.packed.gather(np.asarray(scores))

    def accumulated(self, old: list[np.ndarray], base: Any = None) -> Accumulated:
        scattered = self.packed.scatter
        lengths = [len(values) for values in old]
        weights = scattered(token_weights(lengths, "sequence", max_new_tokens=16))
        advantages = scattered([1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
        logprobs = scattered(old)
        inputs = shard_batch(LossInputs(weights, advantages, *(logprobs,) * 3), self.mesh)
        return self.programs.accumulate(
            self.state.params, self.tokens, inputs, self.packed.microbatches, base
        )


@cache
def programs_of(
    fsdp: int, published: str, compute: str, *, lora: bool = False, offload: bool = False
) -> tuple[Any, Programs]:
    learner = {
        "mesh": Mesh(fsdp=fsdp),
        "packing": Packing(tokens=32, rows=2),
        "compute_dtype": compute,
        "lora": LORA if lora else None,
    }
    spec = changed(
        tiny_spec(),
        learner=learner,
        broadcast={"dtype": published},
        optimizer={"lr": LR, "clip_norm": CLIP_NORM, "offload": offload},
    )
    mesh = make_mesh(spec.learner.mesh)
    return mesh, build_programs(spec, CONFIG, mesh)


def bench(
    *, fsdp: int = 2, published: str = "float32", compute: str = "float32", **switches: bool
) -> Bench:
    mesh, programs = programs_of(fsdp, published, compute, **switches)
    params = init_params(CONFIG, jax.random.key(0))
    state = programs.init_state(shard_params(params, abstract_params(CONFIG), mesh))
    rng = np.random.default_rng(0)
    samples = [
        Sample(rng.integers(0, 32, p), rng.integers(0, 32, n))
        for p, n in ((4, 9), (7, 16), (1, 1), (12, 3), (5, 8), (2, 14))
    ]
    return Bench(mesh, programs, state, pack(samples, tokens=32, rows=2))


def test_a_policy_version_is_its_published_bits() -> None:
    # given a policy that is published in bfloat16 and computed in float32
    rounded = bench(fsdp=1, published="bfloat16")
    published = rounded.programs.publish(rounded.state.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(published)} == {jnp.dtype(jnp.bfloat16)}
    # when its bits are scored, and the masters, and the same bits widened by hand
    scores = [
        np.concatenate(rounded.scores(params))
        for params in (
            published,
            rounded.state.params,
            jax.tree.map(lambda leaf: leaf.astype(jnp.float32), published),
        )
    ]
    # then the score is that of the bits
    assert np.abs(scores[0] - scores[1]).max() > 1e-5
    np.testing.assert_array_equal(scores[0], scores[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_before_the_first_update_is_one(dtype: str) -> None:
    # given pi_old from the published bits of the masters that are being trained
    made = bench(published=dtype, compute=dtype)
    old = made.scores(made.programs.publish(made.state.params))
    # when the first update's gradients are accumulated
    metrics = made.accumulated(old).metrics.means()
    # then nothing has moved yet
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy_drift"] < 1e-5
    assert metrics["kl"] < 1e-9


def test_one_update_is_the_clipped_adamw_step() -> None:
    # given gradients of one optimizer batch
    made = bench()
    old = made.scores(made.programs.publish(made.state.params))
    total = made.accumulated(old)
    grads, before = jax.device_get((total.grads, made.state.params))
    # when applied
    state, update = made.programs.apply(made.state, total)
    # then the norm is that before clipping
    expected = math.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads)))
    assert float(update.grad_norm) == pytest.approx(expected, rel=1e-5)
    assert expected > CLIP_NORM
    # and the first step of Adam moves by lr against the sign of the gradient
    moved = jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, before)
    clipped = jax.tree.map(lambda g: g * CLIP_NORM / expected, grads)
    target = jax.tree.map(lambda g: -LR * g / (np.abs(g) + 1e-8), clipped)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-7), moved, target)
    assert updates_made(state) == 1


def test_published_bits_outlive_the_update() -> None:
    # given a version published in the type of the masters
    made = bench()
    published = made.programs.publish(made.state.params)
    old = made.scores(published)
    total = made.accumulated(old)
    # when the masters' buffers are donated to the update
    state, _ = made.programs.apply(made.state, total)
    # then the version still scores as it did, and the new one does not
    np.testing.assert_array_equal(np.concatenate(made.scores(published)), np.concatenate(old))
    assert any((a != b).any() for a, b in zip(made.scores(state.params), old, strict=True))


def test_masters_and_moments_are_cut_over_fsdp() -> None:
    made = bench()
    # given two devices, then each matrix has half of its elements on each
    mean = optax.tree.get(made.state.optimizer, "mu")
    for tree in (made.state.params, mean):
        layers = tree["layers"]
        matrices = layers["attention"]["q"]["weight"], layers["mlp"]["down"]["weight"]
        for leaf in (tree["embed"], tree["head"], *matrices):
            assert leaf.addressable_shards[0].data.size == leaf.size // 2
    # and a restore is told the same shapes, types and shardings
    for leaf, like in zip(
        jax.tree.leaves(made.state), jax.tree.leaves(made.programs.abstract_state), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)


def test_moments_on_the_host_come_back_from_a_checkpoint_to_the_host(tmp_path: Path) -> None:
    # given the same update with moments on the devices and on the host
    made, offloaded = bench(), bench(offload=True)
    old = made.scores(made.programs.publish(made.state.params))
    state, _ = made.programs.apply(made.state, made.accumulated(old))
    hosted, _ = offloaded.programs.apply(offloaded.state, offloaded.accumulated(old))
    for a, b in zip(jax.tree.leaves(hosted), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)
    # when saved and restored
    with ocp.Context():
        ocp.save(tmp_path / "state", hosted)
        restored = ocp.load(tmp_path / "state", offloaded.programs.abstract_state)
    # then every bit is where it was
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(hosted), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding == b.sharding
    moments = [leaf for leaf in jax.tree.leaves(restored.optimizer) if leaf.ndim]
    assert {leaf.sharding.memory_kind for leaf in moments} == {HOST_MEMORY}


def test_the_gradient_of_adapters_is_the_chain_rule_on_that_of_the_weights() -> None:
    # given the gradient of all weights, and that of adapters on the same base
    made, adapted = bench(), bench(lora=True)
    base = made.programs.freeze(made.state.params)
    old = made.scores(base)
    whole = made.accumulated(old).grads["layers"]
    found = adapted.accumulated(old, base).grads["layers"]
    # then with W + s A B and B = 0, dB is s A^T dW and dA is 0
    adapters, scale = adapted.state.params["layers"], LORA.alpha / LORA.rank
    formulas = {("attention", "q"): "ldr,ldhk->lrhk", ("mlp", "down"): "lfr,lfd->lrd"}
    for target, formula in formulas.items():
        a, weight = leaf_at(adapters, (*target, "a")), leaf_at(whole, (*target, "weight"))
        expected = scale * np.einsum(formula, a, weight)
        gradient = leaf_at(found, target)
        assert np.linalg.norm(gradient["b"] - expected) / np.linalg.norm(expected) < 1e-5
        assert not np.any(gradient["a"])
    # and what is published is the base before the first update, and merged after it
    before = adapted.programs.publish(adapted.state.params, base)
    jax.tree.map(np.testing.assert_array_equal, before, base)
    state, _ = adapted.programs.apply(adapted.state, adapted.accumulated(old, base))
    after = adapted.programs.publish(state.params, base)
    moved = {
        path for path, leaf in HostLeaves(after).items() if np.any(leaf != leaf_at(base, path))
    }
    assert moved == {("layers", *target, "weight") for target in formulas}


def test_a_mesh_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(UserError, match="16 devices, here are"):
        make_mesh(Mesh(data=2, fsdp=4, tensor=2))


def test_a_dimension_that_the_mesh_does_not_divide_is_whole() -> None:
    # given one key/value head on two tensor devices
    mesh = make_mesh(Mesh(tensor=2))
    params = shard_params(init_params(CONFIG, jax.random.key(0)), abstract_params(CONFIG), mesh)
    # then it is on both, and what divides is cut
    assert params["layers"]["attention"]["k"]["weight"].sharding.is_fully_replicated
    assert params["layers"]["mlp"]["gate"]["weight"].addressable_shards[0].data.shape == (2, 16, 12)


@pytest.mark.parametrize(
    ("packing", "mesh", "field"),
    [
        ({"tokens": 32, "rows": 3}, {"data": 2}, "rows"),
        ({"tokens": 31, "rows": 2}, {"context": 2}, "tokens"),
    ],
)
def test_packing_that_does_not_divide_is_refused(
    packing: dict[str, int], mesh: dict[str, int], field: str
) -> None:
    spec = changed(tiny_spec(), learner={"mesh": Mesh(**mesh), "packing": Packing(**packing)})
    with pytest.raises(UserError, match=f"learner.packing.{field}: 3"):
        build_programs(spec, CONFIG, make_mesh(spec.learner.mesh))


def test_pools_of_different_temperatures_are_refused() -> None:
    spec = tiny_spec()
    pool = spec.samplers[0]
    warm = pool.sampling.model_copy(update={"temperature": 1.5})
    other = pool.model_copy(update={"name": "warm", "sampling": warm})
    spec = spec.model_copy(update={"samplers": [pool, other]})
    with pytest.raises(UserError, match="different temperatures"):
        build_programs(spec, CONFIG, make_mesh(spec.learner.mesh))


@pytest.mark.parametrize(("asked", "chunk"), [(None, 128), (4, 4), (4096, 128)])
def test_logits_exist_of_as_many_positions_as_the_spec_says(asked: int | None, chunk: int) -> None:
    # given two shards of 128 positions, and a vocabulary of 32
    spec = changed(tiny_spec(), learner={"logits_chunk": asked})
    programs = build_programs(spec, CONFIG, make_mesh(spec.learner.mesh))
    state, (tokens, inputs) = programs.abstract_state, programs.abstract_batch
    # when log-probs and gradients are lowered
    published = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), state.params)
    texts = [
        programs.score.lower(published, tokens, 1).as_text(),  # type: ignore[attr-defined]
        programs.accumulate.lower(state.params, tokens, inputs, 1).as_text(),  # type: ignore[attr-defined]
    ]
    # then the largest logits [shards, positions, vocabulary] are of so many positions
    for text in texts:
        sizes = {int(n) for n in re.findall(r"tensor<2x(\d+)x32xf32>", text)}
        sizes -= {CONFIG.hidden_size}  # the gradient of the head
        assert max(sizes) == chunk
