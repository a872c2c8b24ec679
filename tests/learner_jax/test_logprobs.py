"""Log-probs and entropies: the softmax in numpy, closed-form gradients, memory, meshes."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from learner_jax.logprobs import token_logprobs
from learner_jax.sharding import make_mesh
from runspec.core.models.memory import KEPT_LOGITS
from runspec.core.spec.schema import Mesh

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
    wanted = targets >= 0
    chosen = jnp.take_along_axis(table, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    entropy = -(jnp.exp(table) * table).sum(-1)
    return jnp.where(wanted, chosen, 0.0), jnp.where(wanted, entropy, 0.0)


def objective(function: Any, hidden: Any, head: Any) -> jax.Array:
    """A number that depends on both results in a different way at each position."""
    logprobs, entropy = function(hidden, head)
    return jnp.sum(logprobs * jnp.cos(logprobs) + entropy**2)


@pytest.mark.parametrize("chunk", [None, 1, 4, 13, 26])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropy_are_those_of_the_softmax(
    chunk: int | None, temperature: float
) -> None:
    hidden, head, targets = arrays()
    # given the softmax in numpy
    logits = hidden @ head / temperature
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    # when computed in chunks that do or do not divide the positions
    logprobs, entropy = token_logprobs(
        jnp.asarray(hidden, jnp.float32),
        jnp.asarray(head, jnp.float32),
        targets,
        temperature=temperature,
        chunk=chunk,
    )
    # then both agree
    expected = np.take_along_axis(table, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(table) * table).sum(-1), atol=1e-5)


def test_large_logits_keep_their_precision() -> None:
    # given logits a thousand apart and two that nearly tie
    logits = np.array([[[1000.0, 999.5, -1000.0]]])
    identity, target = jnp.eye(3, dtype=jnp.float32), np.array([[1]])
    # when
    logprobs, entropy = token_logprobs(
        jnp.asarray(logits, jnp.float32), identity, target, temperature=1.0
    )
    # then the common part has cancelled
    share = 1 / (1 + np.exp(0.5))
    np.testing.assert_allclose(logprobs, [[np.log(share)]], rtol=1e-6)
    expected = -share * np.log(share) - (1 - share) * np.log(1 - share)
    np.testing.assert_allclose(entropy, [[expected]], rtol=1e-6)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("holes", [True, False])
def test_gradients_are_those_of_the_whole_softmax(
    holes: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given chunks whose logits are kept for the backward pass, or computed again
    monkeypatch.setattr("learner_jax.logprobs.KEPT_LOGITS", KEPT_LOGITS if kept else 0)
    hidden, head, targets = arrays(holes=holes)
    with jax.enable_x64(True):
        chunked = partial(token_logprobs, targets=targets, temperature=0.9, chunk=4)
        plain = partial(whole, targets=targets, temperature=0.9)
        # when differentiated, and differentiated by JAX through the whole table
        found, expected = (
            jax.grad(partial(objective, function), (0, 1))(jnp.asarray(hidden), jnp.asarray(head))
            for function in (chunked, plain)
        )
        values = [f(jnp.asarray(hidden), jnp.asarray(head)) for f in (chunked, plain)]
    # then values and gradients agree
    for a, b in zip(
        jax.tree.leaves((found, values[0])), jax.tree.leaves((expected, values[1])), strict=True
    ):
        assert np.linalg.norm(a - b) <= 1e-10 * np.linalg.norm(b)


def test_positions_without_a_target_score_zero() -> None:
    # given hidden states that are not finite where there is no target
    hidden, head, targets = arrays(holes=True)
    hidden[targets < 0] = np.nan
    function = partial(token_logprobs, targets=targets, temperature=1.0, chunk=5)
    # when
    logprobs, entropy = function(jnp.asarray(hidden), jnp.asarray(head))
    # then they score 0
    assert (np.asarray(logprobs)[targets < 0] == 0).all()
    assert (np.asarray(entropy)[targets < 0] == 0).all()
    assert np.isfinite(logprobs).all()


@pytest.mark.parametrize("kept", [True, False])
def test_large_logits_without_a_target_have_no_gradient(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given logits whose exponential is no float32, at positions that share a chunk with targets
    monkeypatch.setattr("learner_jax.logprobs.KEPT_LOGITS", KEPT_LOGITS if kept else 0)
    hidden, head, targets = arrays(holes=True)
    large = np.where((targets < 0)[..., None], 1000.0 * hidden, hidden)
    function = partial(token_logprobs, targets=targets, temperature=0.6)
    # when differentiated
    found, expected = (
        jax.grad(partial(objective, function), (0, 1))(
            jnp.asarray(states, jnp.float32), jnp.asarray(head, jnp.float32)
        )
        for states in (large, hidden)
    )
    # then they add nothing, not even 0 * inf
    np.testing.assert_array_equal(np.asarray(found[0])[targets < 0], 0.0)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_no_target_at_all_is_no_gradient() -> None:
    hidden, head, targets = arrays()
    function = partial(token_logprobs, targets=np.full_like(targets, -1), temperature=1.0)
    value, grads = jax.value_and_grad(partial(objective, function), (0, 1))(hidden, head)
    assert value == 0
    assert all((np.asarray(grad) == 0).all() for grad in grads)


def test_bfloat16_states_sum_the_gradient_of_the_head_in_float32() -> None:
    # given a float32 head used in bfloat16, and many chunks
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 512, D)), jnp.bfloat16)
    targets = rng.integers(0, V, (1, 512))
    head = jnp.asarray(rng.normal(size=(D, V)), jnp.float32)

    def value(head: jax.Array, chunk: int) -> jax.Array:
        return token_logprobs(hidden, head, targets, temperature=1.0, chunk=chunk)[0].sum()

    # when summed over 512 chunks or one
    many, one = jax.grad(value)(head, 1), jax.grad(value)(head, 512)
    # then it is float32 and no more is lost on the way
    assert many.dtype == jnp.float32
    np.testing.assert_allclose(many, one, rtol=0, atol=1e-4 * float(jnp.abs(one).max()))


def test_logits_of_all_positions_never_exist() -> None:
    # given positions whose logits take 2.3 GiB
    length, vocab, chunk = 4096, 151_936, 256
    hidden = jax.ShapeDtypeStruct((1, length, D), jnp.float32)
    head = jax.ShapeDtypeStruct((D, vocab), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def value(hidden: Any, head: Any, targets: Any) -> jax.Array:
        function = partial(token_logprobs, targets=targets, temperature=1.0, chunk=chunk)
        return objective(function, hidden, head)

    # when forward and backward are compiled
    program = jax.jit(jax.grad(value, (0, 1))).lower(hidden, head, targets).compile()
    # then all temporary memory is that of a few chunks
    assert program.memory_analysis().temp_size_in_bytes < 3 * chunk * vocab * 4


@pytest.mark.parametrize(
    "shape", [Mesh(data=2, fsdp=2, tensor=2), Mesh(fsdp=2, context=2, tensor=2)], ids=str
)
def test_a_mesh_changes_nothing_and_gathers_no_logits(shape: Mesh) -> None:
    # given rows, positions and vocabulary cut over eight devices, in numbers found nowhere else
    rows, length, width, vocab, chunk = 4, 30, 22, 74, 7
    mesh = make_mesh(shape)
    rng = np.random.default_rng(0)
    targets = rng.integers(-8, vocab, (rows, length))
    targets = np.where(targets < 0, -1, targets)
    hidden = rng.normal(size=(rows, length, width)).astype(np.float32)
    head = rng.normal(size=(width, vocab)).astype(np.float32)

    def value(mesh: Any, hidden: Any, head: Any) -> jax.Array:
        function = partial(token_logprobs, targets=targets, temperature=0.9, mesh=mesh, chunk=chunk)
        return objective(function, hidden, head)

    expected = jax.grad(partial(value, None), (0, 1))(hidden, head)
    specs = (PartitionSpec(("data", "fsdp"), "context"), PartitionSpec("fsdp", "tensor"))
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    placed = [jax.device_put(x, s) for x, s in zip((hidden, head), shardings, strict=True)]
    # when compiled for the mesh
    program = jax.jit(jax.grad(partial(value, mesh), (0, 1)), out_shardings=shardings)
    compiled = program.lower(*placed).compile()
    # then the gradients are the same
    for a, b in zip(compiled(*placed), expected, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    # and what travels is never logits, nor the head inside a chunk's loop
    moved = re.findall(r"= \(?(.*?)\)? (?:all-gather|all-reduce|all-to-all)\(", compiled.as_text())
    sizes = {
        tuple(map(int, dims.split(",")))
        for line in moved
        for dims in re.findall(r"\[([\d,]+)\]", line)
    }
    assert sizes
    assert not any(chunk in size and set(size) & {vocab, vocab // 2} for size in sizes)
