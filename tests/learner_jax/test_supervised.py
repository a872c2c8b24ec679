"""The supervised loss and its updates: each document as if it were alone, exact penalties, skips.

What a document alone gives comes from `tests.learner_jax.reference`, where nothing is packed.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.corpus.rows import CorpusRows
from learner_jax.logprobs import token_logprobs_and_level
from learner_jax.model import abstract_params
from learner_jax.sharding import make_mesh, shard_batch, shard_params
from learner_jax.step import Programs, TrainState, build_programs
from learner_jax.supervised import SupervisedResult, held_out_loss, supervised_step
from learner_jax.supervised_loss import DocumentInputs
from runspec.core.errors import UserError
from runspec.core.models.memory import KEPT_LOGITS
from runspec.core.process import RunStopped
from runspec.core.spec.schema import Mesh, RunSpec
from tests.learner_jax.conftest import changed, updates_made
from tests.learner_jax.document_rows import joined, rows_of, supervised_spec
from tests.learner_jax.reference import logits_of, relative_errors
from tests.learner_jax.test_gradients import CONFIG, params_of

LENGTHS = (13, 2, 31, 7)
RARE = CONFIG.vocab_size - 1
"""A token that only documents of a test's choice have."""
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
MESHES: list[dict[str, int]] = [
    {},
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
]
LEVELS = ["logsumexp", "max_logit"]


def documents_of(seed: int = 0, count: int = 12) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    lengths = (LENGTHS[number % len(LENGTHS)] for number in range(count))
    return [draw.integers(0, RARE, length).astype(np.int32) for length in lengths]


def level_of(logits: Any, kind: str) -> Any:
    return jax.nn.logsumexp(logits, -1) if kind == "logsumexp" else jnp.max(logits, -1)


@partial(jax.jit, static_argnames="kind")
def alone(params: Any, document: jax.Array, kind: str, coef: float = 0.0) -> Any:
    """Sums over the tokens of one document: nll + coef z^2 with its gradient, and nll."""

    def sums(params: Any) -> Any:
        logits = logits_of(params, CONFIG, document[:-1])
        table = jax.nn.log_softmax(logits)
        nll = -table[np.arange(len(document) - 1), document[1:]].sum()
        return nll + coef * jnp.sum(level_of(logits, kind) ** 2), nll

    return jax.value_and_grad(sums, has_aux=True)(params)


def each_alone(
    documents: list[np.ndarray],
    weights: list[float],
    dtype: str,
    kind: str = "logsumexp",
    coef: float = 0.0,
) -> tuple[float, Any]:
    """The loss of one update and its gradient, a document at a time."""
    params, grads, loss = params_of(dtype), [], 0.0
    total = sum(w * (len(d) - 1) for w, d in zip(weights, documents, strict=True))
    for weight, document in zip(weights, documents, strict=True):
        (value, _), grad = alone(params, document, kind, coef)
        loss += weight / total * float(value)
        grads.append(jax.tree.map(lambda g, w=weight: np.asarray(g) * (w / total), grad))
    return loss, jax.tree.map(lambda *parts: sum(parts), *grads)


@cache
def built(spec_json: str, dtype: str) -> tuple[jax.sharding.Mesh, Programs]:
    spec = changed(
        RunSpec.model_validate_json(spec_json),
        learner={"compute_dtype": dtype, "master_dtype": dtype},
        broadcast={"dtype": dtype},
    )
    mesh = make_mesh(spec.learner.mesh)
    return mesh, build_programs(spec, CONFIG, mesh)


def spec_with(dtype: str = "float32", **changes: Any) -> RunSpec:
    return supervised_spec(dtype=dtype, **changes)


def programs_of(spec: RunSpec) -> tuple[jax.sharding.Mesh, Programs]:
    dtype = str(spec.learner.master_dtype)
    plain = changed(
        spec,
        learner={"compute_dtype": "float32", "master_dtype": "float32"},
        broadcast={"dtype": "float32"},
    )
    return built(plain.model_dump_json(by_alias=True), dtype)


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("kept", [True, False])
def test_levels_and_their_gradients_are_those_of_all_logits(
    kept: bool, chunk: int | None, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner_jax.logprobs.KEPT_LOGITS", KEPT_LOGITS if kept else 0)
    assert_levels(kind, chunk, None)


@pytest.mark.parametrize("kind", LEVELS)
def test_levels_are_the_same_where_the_vocabulary_is_cut(kind: Any) -> None:
    assert_levels(kind, 3, make_mesh(Mesh(data=2, context=2, tensor=2)))


def assert_levels(kind: Any, chunk: int | None, mesh: jax.sharding.Mesh | None) -> None:
    # given hidden states, targets with holes, and two tokens whose logits are always the same
    rng = np.random.default_rng(0)
    targets = rng.integers(-6, 22, (4, 14)).clip(-1)
    hidden, head = rng.normal(size=(4, 14, 8)), rng.normal(size=(8, 22))
    head[:, 3] = head[:, 17] = 2 * head[:, 3]

    def whole(hidden: Any, head: Any) -> Any:
        logits, wanted = hidden @ head, targets >= 0
        table = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(table, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        return jnp.where(wanted, chosen, 0.0), jnp.where(wanted, level_of(logits, kind), 0.0)

    def ours(hidden: Any, head: Any) -> Any:
        return token_logprobs_and_level(hidden, head, targets, kind, mesh=mesh, chunk=chunk)

    def objective(function: Any, hidden: Any, head: Any) -> Any:
        logprobs, level = found = function(hidden, head)
        return jnp.sum(logprobs * jnp.cos(logprobs) + level**3), found

    # when computed and differentiated, and by JAX through all logits
    with jax.enable_x64(True):
        found, expected = (
            jax.jit(jax.value_and_grad(partial(objective, function), (0, 1), has_aux=True))(
                jnp.asarray(hidden), jnp.asarray(head)
            )
            for function in (ours, whole)
        )
    # then values and gradients agree
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 1e-12 * np.linalg.norm(b)


def accumulated(spec: RunSpec, rows: CorpusRows) -> tuple[float, Any, dict[str, float]]:
    """Loss, gradient and metrics of one update by the jitted programs."""
    mesh, programs = programs_of(spec)
    params = shard_params(params_of(spec.learner.master_dtype), abstract_params(CONFIG), mesh)
    shape = programs.abstract_batch[1].weights.shape
    weights = rows.weights / rows.weights.sum(dtype=np.float64)
    inputs = DocumentInputs(weights.astype(rows.weights.dtype).reshape(shape))
    tokens = jax.tree.map(lambda x: x.reshape(shape), rows.batch)
    total = programs.accumulate(params, *shard_batch((tokens, inputs), mesh), shape[0])
    total = jax.device_get(total)
    return float(total.metrics.loss), total.grads, total.metrics.means()


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: " ".join(mesh) or "one")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_loss_and_gradient_are_those_of_each_document_alone(
    dtype: str, mesh: dict[str, int]
) -> None:
    # given documents of two sources, one of which weighs three times as much, and a penalty
    documents, coef = documents_of(), 1e-2
    weights = [3.0 if number % 5 == 0 else 1.0 for number in range(len(documents))]
    spec = spec_with(dtype, mesh=mesh, z_loss={"kind": "logsumexp", "coef": coef})
    with jax.enable_x64(dtype == "float64"):
        # when trained packed, and each alone
        loss, grads, metrics = accumulated(spec, rows_of(spec, documents, weights))
        expected, alone_grads = each_alone(documents, weights, dtype, "logsumexp", coef)
    # then loss and gradient are the same
    assert loss == pytest.approx(expected, rel=TOLERANCE[dtype])
    assert max(relative_errors(grads, alone_grads).values()) < TOLERANCE[dtype]
    assert metrics["nonfinite_tokens"] == 0
