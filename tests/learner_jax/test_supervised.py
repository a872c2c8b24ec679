"""The supervised loss and its updates: each document as if it were alone, exact penalties, skips.

What a document alone gives comes from `tests.learner_jax.reference`, where nothing is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.corpus.packed import CorpusRows
from learner_jax.logprobs import token_logprobs
from learner_jax.model import abstract_params
from learner_jax.packing import LossInputs, Sample, pack
from learner_jax.sharding import make_mesh, shard_batch, shard_params
from learner_jax.step import Programs, TrainState, build_programs, microbatch_bound
from learner_jax.training import StepResult, held_out_loss, supervised_step
from runspec.core.errors import UserError
from runspec.core.models.parameters import KEPT_LOGITS
from runspec.core.schema import Mesh, Packing, Remat, RunSpec
from tests.learner_jax.conftest import changed, tiny_spec, updates_made
from tests.learner_jax.reference import logits_of, relative_errors
from tests.learner_jax.test_gradients import CONFIG, params_of

pytestmark = pytest.mark.slow

LENGTHS = (13, 2, 31)
RARE = CONFIG.vocab_size - 1
"""A token that only documents of a test's choice have."""
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
MESHES: list[dict[str, int]] = [
    {},
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
]
LEVELS = ["logsumexp", "max_logit"]


PACKING = Packing(tokens=32, rows=4)


def supervised_spec(
    *,
    mesh: dict[str, int] | None = None,
    dtype: str = "float32",
    remat: Remat = "none",
    optimizer: dict[str, Any] | None = None,
    steps: int = 4,
    **algorithm: Any,
) -> RunSpec:
    """A run on documents, in updates of two microbatches; `dtype` of masters and products."""
    spec = tiny_spec(
        steps=steps,
        data={"sources": [{"name": "text", "kind": "text", "uri": "text.txt"}]},
        algorithm={
            "kind": "pretrain",
            "tokens_per_update": 2 * PACKING.rows * PACKING.tokens,
            **algorithm,
        },
        optimizer={"lr": 1e-3, "clip_norm": 0.5, **(optimizer or {})},
        reward=[],
        samplers=[],
        verify={"validators": 0},
    )
    learner = {
        "mesh": Mesh(**(mesh or {})),
        "packing": PACKING,
        "remat": remat,
        "compute_dtype": dtype,  # float64 is no choice of a spec
        "master_dtype": dtype,
    }
    return changed(spec, learner=learner, broadcast={"dtype": dtype})


def rows_of(
    spec: RunSpec, documents: Sequence[np.ndarray], weights: Sequence[float] | None = None
) -> CorpusRows:
    """The rows of one update, all tokens but a document's first trained.

    Args:
        spec: of `supervised_spec`.
        documents: int32 [n], at least two tokens each.
        weights: one of each document, or more, which are left out; 1 by default.
    """
    packing = spec.learner.packing
    packed = pack(
        [Sample(document[:1], document[1:]) for document in documents],
        tokens=packing.tokens,
        rows=packing.rows,
        microbatches=microbatch_bound(spec),
    )
    each = [1.0] * len(documents) if weights is None else list(weights)
    laid = packed.scatter(each[: len(documents)])
    batch = jax.tree.map(lambda x: x.reshape(-1, packing.tokens), packed.batch)
    kind = spec.learner.master_dtype
    return CorpusRows(batch, laid.reshape(-1, packing.tokens).astype(kind))


def joined(*parts: CorpusRows) -> CorpusRows:
    """The rows of several updates, one after the other."""
    batch = jax.tree.map(lambda *x: np.concatenate(x), *[part.batch for part in parts])
    return CorpusRows(batch, np.concatenate([part.weights for part in parts]))


def documents_of(seed: int = 0, count: int = 12) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    lengths = (LENGTHS[number % len(LENGTHS)] for number in range(count))
    return [draw.integers(0, RARE, length).astype(np.int32) for length in lengths]


def level_of(logits: Any, kind: str) -> Any:
    return jax.nn.logsumexp(logits, -1) if kind == "logsumexp" else jnp.max(logits, -1)


@jax.jit
def alone(params: Any, document: jax.Array) -> dict[str, Any]:
    """Sums over the tokens of one document: nll, and z^2 of either kind."""
    logits = logits_of(params, CONFIG, document[:-1])
    table = jax.nn.log_softmax(logits)
    nll = -table[np.arange(len(document) - 1), document[1:]].sum()
    return {"nll": nll} | {kind: jnp.sum(level_of(logits, kind) ** 2) for kind in LEVELS}


@jax.jit
def gradient_alone(params: Any, document: jax.Array, coef: float) -> tuple[Any, Any]:
    """nll + coef z^2 of one document, z the logsumexp, and its gradient."""

    def loss(params: Any) -> Any:
        sums = alone(params, document)
        return sums["nll"] + coef * sums["logsumexp"]

    return jax.value_and_grad(loss)(params)


BUILT: dict[str, tuple[jax.sharding.Mesh, Programs]] = {}


def programs_of(spec: RunSpec) -> tuple[jax.sharding.Mesh, Programs]:
    """Made once for each spec."""
    if repr(spec) not in BUILT:
        mesh = make_mesh(spec.learner.mesh)
        BUILT[repr(spec)] = mesh, build_programs(spec, CONFIG, mesh)
    return BUILT[repr(spec)]


@pytest.mark.parametrize(
    ("kind", "chunk", "kept", "axes"),
    [
        ("logsumexp", None, True, {}),
        ("max_logit", 5, True, {}),
        ("logsumexp", 5, False, {}),
        *((kind, 3, True, {"data": 2, "context": 2, "tensor": 2}) for kind in LEVELS),
    ],
)
def test_levels_and_their_gradients_are_those_of_all_logits(kind, chunk, kept, axes, monkeypatch):
    monkeypatch.setattr("learner_jax.logprobs.KEPT_LOGITS", KEPT_LOGITS if kept else 0)
    mesh = make_mesh(Mesh(**axes)) if axes else None
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
        how = {"temperature": 1.0, "mesh": mesh, "chunk": chunk, "level": kind}
        return token_logprobs(hidden, head, targets, **how)

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
    inputs = LossInputs(weights.astype(rows.weights.dtype).reshape(shape))
    tokens = jax.tree.map(lambda x: x.reshape(shape), rows.batch)
    total = programs.accumulate(params, *shard_batch((tokens, inputs), mesh), shape[0])
    total = jax.device_get(total)
    return float(total.metrics.loss), total.grads, total.metrics.means()


@pytest.mark.parametrize(
    ("dtype", "mesh"), [("float64", MESHES[0]), ("float64", MESHES[1]), ("float32", MESHES[2])]
)
def test_loss_and_gradient_are_those_of_each_document_alone(dtype, mesh):
    # given documents of two sources, one of which weighs three times as much, and a penalty
    documents, coef = documents_of(), 1e-2
    weights = [3.0 if number % 5 == 0 else 1.0 for number in range(len(documents))]
    spec = supervised_spec(dtype=dtype, mesh=mesh, z_loss={"kind": "logsumexp", "coef": coef})
    total = sum(weight * (len(d) - 1) for weight, d in zip(weights, documents, strict=True))
    with jax.enable_x64(dtype == "float64"):
        # when trained packed, and each alone
        loss, grads, metrics = accumulated(spec, rows_of(spec, documents, weights))
        params, expected, sums = params_of(dtype), 0.0, jax.tree.map(np.zeros_like, grads)
        for weight, document in zip(weights, documents, strict=True):
            value, gradient = gradient_alone(params, document, coef)
            expected += weight / total * float(value)
            sums = jax.tree.map(lambda x, g, w=weight: x + w / total * g, sums, gradient)
    # then loss and gradient are the same
    assert loss == pytest.approx(expected, rel=TOLERANCE[dtype])
    assert max(relative_errors(grads, sums).values()) < TOLERANCE[dtype]
    assert metrics["nonfinite_tokens"] == 0


def state_of(spec: RunSpec, params: Any = None) -> TrainState:
    mesh, programs = programs_of(spec)
    params = params_of("float32") if params is None else params
    return programs.init_state(shard_params(params, abstract_params(CONFIG), mesh))


def stepped(spec: RunSpec, *steps: CorpusRows, params: Any = None) -> StepResult:
    """The result of the last step, made after the others."""
    mesh, programs = programs_of(spec)
    state = state_of(spec, params)
    for rows in steps:
        result = supervised_step(spec, mesh, programs, state, rows)
        state = result.state
    return result


def flat(result: StepResult) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.state.params)])


def update_rows(spec: RunSpec, seed: int = 0, weights: list[float] | None = None) -> CorpusRows:
    return rows_of(spec, documents_of(seed), weights)


def test_a_step_makes_its_updates_one_after_the_other():
    # given a step of two updates, of which one has documents of a third of the weight
    once, twice = supervised_spec(), supervised_spec(updates_per_step=2)
    parts = update_rows(once, 0), update_rows(once, 1, [1.0, 3.0, 1.0] * 4)
    both = stepped(twice, joined(*parts))
    # then it is what two steps of one update are, in state and in numbers
    first, second = stepped(once, parts[0]), stepped(once, *parts)
    np.testing.assert_array_equal(flat(both), flat(second))
    assert (updates_made(both.state), both.skipped) == (2, ())
    for name in ("loss", "nll", "grad_norm"):
        mean = (first.numbers[name] + second.numbers[name]) / 2
        assert both.numbers[name] == pytest.approx(mean, rel=1e-6)
    # and it counts what it trained
    tokens = sum(len(document) for seed in (0, 1) for document in documents_of(seed))
    assert both.tokens == tokens
    assert both.padding_share == 1.0 - tokens / (parts[0].weights.size * 2)


@pytest.mark.parametrize("kind", LEVELS)
def test_numbers_of_a_step_are_those_of_its_documents(kind):
    # given documents of unequal weight, and a penalty
    coef, documents = 0.1, documents_of()
    weights = np.where(np.arange(len(documents)) % 5, 0.25, 2.0)
    spec = supervised_spec(z_loss={"kind": kind, "coef": coef})
    numbers = stepped(spec, rows_of(spec, documents, weights.tolist())).numbers
    # then the loss has the weights in it; nll and z are means over tokens, whatever they weigh
    params = params_of("float32")
    sums = [alone(params, document) for document in documents]
    nll, z = (np.array([float(each[name]) for each in sums]) for name in ("nll", kind))
    lengths = np.array([len(document) - 1 for document in documents])
    expected = {
        "loss": weights @ (nll + coef * z) / (weights @ lengths),
        "nll": nll.sum() / lengths.sum(),
        "z": z.sum() / lengths.sum(),
    }
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def spoiled() -> Any:
    """Parameters under which the rare token has no finite log-prob of what follows it."""
    params = params_of("float32")
    return params | {"embed": params["embed"].at[RARE].set(np.nan)}


def with_rare_token(spec: RunSpec, seed: int = 0) -> tuple[CorpusRows, int]:
    """Rows of an update, of which one has the rare token, and the number of that row."""
    rows = update_rows(spec, seed)
    row = int(np.flatnonzero(rows.batch.segment_ids[:, 0])[-1])
    rows.batch.tokens[row, 0] = RARE
    return rows, row


def test_an_update_that_is_not_finite_is_skipped_and_its_rows_are_named():
    # given a step of two updates, and a row of the second whose loss is not finite
    once, twice = supervised_spec(), supervised_spec(updates_per_step=2)
    bad, row = with_rare_token(once, 1)
    good = update_rows(once, 0)
    result = stepped(twice, joined(good, bad), params=spoiled())
    # then the first was made and the second was not
    assert (updates_made(result.state), int(result.state.skipped)) == (1, 1)
    np.testing.assert_array_equal(flat(result), flat(stepped(once, good, params=spoiled())))
    # and it is counted, its row is named, and the numbers are those of the first
    (skipped,) = result.skipped
    assert (skipped.update, skipped.identified) == (1, True)
    assert skipped.names == (f"row {row} of the update",)
    assert f"finite in row {row} of the update" in str(skipped)
    assert result.numbers["skipped_updates"] == 1 and np.isfinite(result.numbers["loss"])
    assert result.numbers["nonfinite_tokens"] > 0


def test_all_rows_are_named_where_no_log_prob_tells():
    # given a penalty that is no float32, while every log-prob is finite
    spec = supervised_spec(z_loss={"kind": "logsumexp", "coef": 1e38})
    result = stepped(spec, update_rows(spec))
    (skipped,) = result.skipped
    assert not skipped.identified and "in it were row 0 of the update; row 1" in str(skipped)
    assert np.isnan(result.numbers["loss"]) and result.numbers["nonfinite_tokens"] > 0


def test_rows_that_train_nothing_are_refused():
    spec = supervised_spec(updates_per_step=2)
    rows = joined(update_rows(spec), update_rows(spec, weights=[0.0] * 12))
    with pytest.raises(UserError, match="train no token"):
        stepped(spec, rows)


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["one", "eight"])
@pytest.mark.parametrize("count", [3, 29])
def test_the_held_out_loss_is_the_sum_over_each_document_alone(count, mesh):
    # given documents of unequal weight, in fewer rows than an update has, or in more
    spec, documents = supervised_spec(mesh=mesh), documents_of(2, count)
    starts = range(0, count, 12)
    rows = joined(*(rows_of(spec, documents[at : at + 12], [0.5, 2.0, 1.0] * 4) for at in starts))
    used = rows.batch.segment_ids.any(axis=1)
    rows = CorpusRows(jax.tree.map(lambda x: x[used], rows.batch), rows.weights[used])
    device_mesh, programs = programs_of(spec)
    assert len(rows.weights) % 8  # the last part of them is filled up
    params = shard_params(params_of("float32"), abstract_params(CONFIG), device_mesh)
    # when computed
    found = held_out_loss(spec, device_mesh, programs, params, rows)
    # then it is that sum, whatever they weigh
    params = params_of("float32")
    expected = sum(float(alone(params, d)["nll"]) for d in documents)
    assert found == pytest.approx(expected, rel=1e-6)
