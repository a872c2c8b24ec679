"""The outer update: optax's, OpenDiLoCo's, and that of one data-parallel learner."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from blake3 import blake3
from transformers import AutoModelForCausalLM, LlamaConfig

from bridge.tensors import SEGMENT, FlatLayout, codec
from learner_jax.corpus.packed import CorpusRows
from learner_jax.islands.state import OuterState, encode_share, outer_update, weighted_mean
from learner_jax.leaves import HostLeaves, leaf_path, load_params
from learner_jax.sharding import make_mesh
from learner_jax.step import Programs, build_programs
from learner_jax.training import supervised_step
from runspec.core.models.family import load_config
from runspec.core.schema import Outer
from tests.learner_jax.test_gradients import CONFIG as DOCUMENT_CONFIG
from tests.learner_jax.test_gradients import params_of
from tests.learner_jax.test_supervised import (
    PACKING,
    documents_of,
    joined,
    rows_of,
    stepped,
    supervised_spec,
)

pytestmark = pytest.mark.slow

N = 1000


def vectors(count: int, seed: int = 0, n: int = N) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).standard_normal((count, n)).astype(np.float32))


@pytest.mark.parametrize(
    ("lr", "momentum", "nesterov"), list(product([0.7, 1.0], [0.0, 0.9], [True, False]))
)
def test_the_outer_update_is_optax_sgd(lr, momentum, nesterov):
    # given twenty pseudo-gradients
    theta, *gradients = vectors(21)
    rule = optax.sgd(lr, momentum, nesterov)
    params, moments = theta, rule.init(theta)
    state = OuterState.initial(theta)
    for gradient in gradients:
        # when both make their updates
        updates, moments = rule.update(gradient, moments, params)
        params = optax.apply_updates(params, updates)
        state = outer_update(state, gradient, Outer(lr=lr, momentum=momentum, nesterov=nesterov))
        # then the parameters are the same
        assert state.theta.dtype == state.momentum.dtype == np.float32
        np.testing.assert_allclose(state.theta, params, rtol=1e-6, atol=1e-6 * np.abs(params).max())


def test_segments_do_not_show():
    # given vectors longer than a segment
    theta, *shares = vectors(3, n=SEGMENT + N)

    def step(part: slice) -> OuterState:
        mean = weighted_mean((share[part] for share in shares), [1.0, 2.0])
        state = outer_update(OuterState.initial(theta[part]), mean, Outer())
        return outer_update(state, mean, Outer())

    # then the second segment is as it is alone
    whole, alone = step(slice(None)), step(slice(SEGMENT, None))
    np.testing.assert_array_equal(whole.theta[SEGMENT:], alone.theta)
    np.testing.assert_array_equal(whole.momentum[SEGMENT:], alone.momentum)


def test_the_digest_is_of_theta_then_the_momentum():
    theta, momentum = vectors(2)
    expected = blake3(theta.tobytes() + momentum.tobytes()).hexdigest()
    assert OuterState(theta, momentum).digest == expected
    assert OuterState(momentum, theta).digest != expected


def test_the_mean_is_weighted_in_float32_and_in_the_order_given():
    shares, weights = vectors(3), [1.0, 5.0, 3.0]
    mean = weighted_mean(iter(shares), weights)
    # then it is that of float64 within rounding, and its bits are those of this order
    assert mean.dtype == np.float32
    expected = np.average(np.array(shares, np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(mean, expected, atol=1e-6)
    parts = [share * np.float32(weight / 9) for share, weight in zip(shares, weights, strict=True)]
    np.testing.assert_array_equal(mean, (parts[0] + parts[1]) + parts[2])


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, float("nan")], [1.0], [1.0] * 3])
def test_weights_that_make_no_mean_are_refused(weights):
    with pytest.raises(ValueError):
        weighted_mean(vectors(2), weights)


@pytest.mark.parametrize("kind", ["float16", "sparse"])
def test_what_a_share_lost_is_in_the_next(kind):
    # given a residual, of codecs with feedback
    each, (delta, before) = codec(kind), vectors(2)
    kept = delta.copy(), before.copy()
    data, residual, norm = encode_share(each, delta, before if each.feedback else None)
    # then the share is of the sum, with the codec's decay
    wanted = delta + before * np.float32(each.feedback)
    assert data == each.encode(wanted)
    decoded = each.decode(data, N)
    assert norm == pytest.approx(np.linalg.norm(decoded.astype(float)))
    if not each.feedback:
        assert residual is None
        return
    np.testing.assert_array_equal(residual, wanted - decoded)
    # and the arguments are as they were
    np.testing.assert_array_equal([delta, before], kept)


def test_with_feedback_the_shares_add_up_to_the_deltas():
    # given the same pseudo-gradient at each of many steps
    each, (delta,) = codec("sparse"), vectors(1, n=8192)
    steps, residual, total = 300, None, np.zeros(8192)
    for _ in range(steps):
        data, residual, _ = encode_share(each, delta, residual)
        total += each.decode(data, 8192)
    # then their mean comes near it: a part of what a share leaves out decays
    assert np.linalg.norm(total / steps - delta) < 0.6 * np.linalg.norm(delta)


TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
PLAIN = {"kind": "sgd", "momentum": 0.0, "clip_norm": 1e9}
"""An inner update that is linear in the gradient."""


MEAN = Outer(lr=1.0, momentum=0.0)
"""Takes the mean of the islands' parameters."""


def averaged(
    theta: np.ndarray, islands: Sequence[np.ndarray], weights: Sequence[float]
) -> np.ndarray:
    """The outer parameters after a step that began at theta; the islands' own are [n] each."""
    gradient = weighted_mean((theta - own for own in islands), weights)
    return outer_update(OuterState.initial(theta), gradient, MEAN).theta


def assert_equal_updates(
    theta: np.ndarray, found: np.ndarray, expected: np.ndarray, dtype: str
) -> None:
    moved = np.linalg.norm(expected - theta)
    assert moved > 0.1 * np.linalg.norm(theta)
    assert np.linalg.norm(found - expected) < TOLERANCE[dtype] * moved


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_islands_of_documents_are_one_data_parallel_learner(dtype):
    # given two islands' documents, unequally many, some of which weigh four times as much
    spec = supervised_spec(dtype=dtype, optimizer={**PLAIN, "lr": 2.0})
    documents, weights = documents_of(), [4.0 if number % 5 == 0 else 1.0 for number in range(12)]
    whole, *parts = (
        rows_of(spec, documents[part], weights[part])
        for part in (slice(None), slice(0, 3), slice(3, None))
    )
    layout = FlatLayout(DOCUMENT_CONFIG)
    with jax.enable_x64(dtype == "float64"):
        params = params_of(dtype)

        def stepped_rows(rows: CorpusRows) -> np.ndarray:
            state = stepped(spec, rows, params=params).state
            return layout.flatten(HostLeaves(state.params), dtype)

        # when each makes a step, and one learner makes it with all documents
        theta = layout.flatten(HostLeaves(params), dtype)
        expected = stepped_rows(whole)
        islands = [stepped_rows(part) for part in parts]
    found = averaged(theta, islands, [float(part.weights.sum()) for part in parts])
    # then both make the same update
    assert_equal_updates(theta, found, expected, dtype)


def opendiloco(model: torch.nn.Module, batches: torch.Tensor, lr: float) -> list[float]:
    """Train by OpenDiLoCo (arXiv 2407.07852) in plain torch, a worker for each part of the data.

    Args:
        model: a causal model of transformers; it becomes the outer one.
        batches: int64 [outer steps, workers, inner steps, rows, tokens].
        lr: of the inner AdamW.

    Returns:
        The mean loss of the inner steps of each outer step.
    """
    workers = [copy.deepcopy(model) for _ in batches[0]]
    inner = [
        torch.optim.AdamW(worker.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.1)
        for worker in workers
    ]
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    means = []
    for step in batches:
        losses = []
        for worker, optimizer, local in zip(workers, inner, step, strict=True):
            worker.load_state_dict(model.state_dict())
            for rows in local:
                loss = worker(input_ids=rows, labels=rows).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(worker.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        for outer_one, *own in zip(
            model.parameters(), *(worker.parameters() for worker in workers), strict=True
        ):
            outer_one.grad = torch.stack([outer_one.data - each.data for each in own]).mean(dim=0)
        outer.step()
        means.append(sum(losses) / len(losses))
    return means


STEPS, ISLANDS, UPDATES, LR = 20, 2, 3, 3e-3
ROWS = 2 * PACKING.rows


def saved_model(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))
    model.to(torch.float32).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def sequences() -> np.ndarray:
    """Counting by one, two or three, modulo 16: int64 [steps, islands, updates, rows, tokens]."""
    rng = np.random.default_rng(0)
    shape = (STEPS, ISLANDS, UPDATES, ROWS, 1)
    return (rng.integers(16, size=shape) + rng.integers(1, 4, shape) * np.arange(30)) % 16


def masters_of(layout: FlatLayout, theta: np.ndarray, programs: Programs) -> Any:
    """Outer parameters as the masters of an island."""
    leaves = dict(layout.leaves(theta))
    return jax.tree.map_with_path(
        lambda path, like: jax.device_put(leaves[leaf_path(path)], like.sharding),
        programs.abstract_state.params,
    )


def island_losses(directory: Path, data: np.ndarray) -> list[float]:
    """The mean loss of each step, by the learner's programs and the outer optimizer."""
    spec = supervised_spec(
        optimizer={"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip_norm": 1.0},
        updates_per_step=UPDATES,
        steps=STEPS,
    )
    config, mesh = load_config(directory), make_mesh(spec.learner.mesh)
    programs, layout, each = (
        build_programs(spec, config, mesh),
        FlatLayout(config),
        codec("float32"),
    )
    params = load_params(directory, config, mesh)
    outer = OuterState.initial(layout.flatten(HostLeaves(params)))
    states = [programs.init_state(params) for _ in range(ISLANDS)]
    means = []
    for step in data:
        shares, losses = [], []
        for island, local in enumerate(step):
            masters = masters_of(layout, outer.theta, programs)
            rows = joined(*(rows_of(spec, list(update.astype(np.int32))) for update in local))
            state = replace(states[island], params=masters)
            result = supervised_step(spec, mesh, programs, state, rows)
            states[island] = result.state
            delta = outer.theta - layout.flatten(HostLeaves(result.state.params))
            shares.append(encode_share(each, delta, None)[0])
            losses.append(result.numbers["loss"])
        decoded = (each.decode(share, layout.size) for share in shares)
        outer = outer_update(outer, weighted_mean(decoded, [1.0] * ISLANDS), Outer())
        means.append(sum(losses) / len(losses))
    return means


def test_losses_are_those_of_opendiloco_over_twenty_outer_steps(tmp_path):
    # given a model and three islands' data
    directory, data = saved_model(tmp_path / "model"), sequences()
    # when both train it
    expected = opendiloco(
        AutoModelForCausalLM.from_pretrained(directory), torch.from_numpy(data), LR
    )
    found = island_losses(directory, data)
    # then it learns, and the losses are the same
    assert found[-1] < 0.5 * found[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
