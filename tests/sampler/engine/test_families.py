"""A sampler of every family that the learner trains computes what the learner does, or says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from runspec.core.errors import UserError
from sampler.engine.engine import Engine
from tests.sampler.engine.agreement import assert_follows, assert_takes_over
from tests.sampler.engine.conftest import cpu_pool, running_engine
from tests.sampler.engine.families import FAMILIES, Learner
from tests.sampler.engine.models import MAX_MODEL_LEN, VOCABULARY

pytestmark = pytest.mark.slow
needs_two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="a rank needs a core of its own"
)


@pytest.fixture(scope="module", params=FAMILIES)
def learner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Learner:
    return Learner(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def engine(learner: Learner) -> Iterator[Engine]:
    with running_engine(learner.initial) as engine:
        yield engine


@pytest.fixture(scope="module")
def ranks(learner: Learner) -> Iterator[Engine]:
    """Two ranks whose matrices can be read back."""
    extension = "tests.sampler.engine.plain_matrices.PlainMatricesExtension"
    options = {"worker_extension_cls": extension}
    with closing(Engine(cpu_pool(tensor=2), options=options)) as engine:
        engine.load(learner.initial, 0)
        yield engine


def assert_agrees(engine: Engine, learner: Learner) -> None:
    """Over the whole context, on tokens that nobody sampled."""
    rng = np.random.default_rng(2)
    texts = [rng.integers(2, VOCABULARY, length).tolist() for length in (MAX_MODEL_LEN - 1, 60, 2)]
    expected = learner.logprobs(learner.params, [(text[:1], text[1:]) for text in texts])
    found = engine.prompt_logprobs(texts)
    assert np.abs(np.concatenate(found) - np.concatenate(expected)).mean() < 1e-5


def test_given_tokens_have_the_learners_log_probs(engine: Engine, learner: Learner) -> None:
    assert_agrees(engine, learner)


def test_a_stale_group_is_named_and_a_reload_makes_it_new(engine: Engine, learner: Learner) -> None:
    for group in learner.groups():
        # given an engine, and a version in which one group of weights is another
        params = learner.changed(group, noisy)
        version = learner.publish(params)
        # when the version is checked without having been loaded, then the group is named
        with pytest.raises(UserError) as error:
            engine.check(version, 1)
        names = learner.tensor_names(group)
        if names[0].endswith("_proj.weight"):  # CPUs hold these in packed copies alone
            assert "log-probs differ" in str(error.value)
            assert f"*.{'.'.join(names[0].split('.')[-2:])}" in str(error.value)
        else:
            assert "other bytes" in str(error.value)
            assert all(name in str(error.value) for name in names)
        # and when it is loaded, then the engine says what the learner says
        assert_follows(engine, version, partial(learner.logprobs, params))
        engine.load(learner.initial, 0)


@needs_two_cores
def test_every_rank_holds_its_slices_of_every_tensor(ranks: Engine, learner: Learner) -> None:
    # given two ranks that loaded a version, when it is read back
    report = ranks.load(learner.initial, 1)
    # then every tensor of the files is
    assert sorted(report.compared) == sorted(
        name for group in learner.groups() for name in learner.tensor_names(group)
    )
    # (of the head vLLM may keep a packed copy besides, which this does not see)
    assert set(report.repacked) <= {"model.embed_tokens.weight", "lm_head.weight"}
    assert_agrees(ranks, learner)


@needs_two_cores
def test_one_number_on_the_last_rank_alone_is_missed(ranks: Engine, learner: Learner) -> None:
    for group in learner.groups():
        # given a version that differs in the last number of each tensor of a group
        version = learner.publish(learner.changed(group, last_number))
        # when it is checked without having been loaded, then these are named and nothing else
        with pytest.raises(UserError, match="other bytes") as error:
            ranks.check(version, 1)
        names = learner.tensor_names(group)
        assert f"in {len(names)} tensors: {', '.join(sorted(names))}" in str(error.value)


@needs_two_cores
def test_ranks_take_over_a_version_as_one_rank_does(
    ranks: Engine, learner: Learner, tmp_path: Path
) -> None:
    assert_takes_over(ranks, learner.initial, tmp_path)


def test_a_tensor_that_vllm_drops_in_silence_is_named(
    new_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    # given a Qwen3 with biases, of which vLLM's has none on attention's output
    learner = Learner({**FAMILIES["qwen3"], "attention_bias": True}, tmp_path)
    # when it is loaded, then these are named and nothing is sampled
    with pytest.raises(UserError, match=r"none, in 2 tensors: .*layers.0.self_attn.o_proj.bias"):
        new_engine().load(learner.initial, 0)


def noisy(leaf: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(4)
    noise = rng.normal(size=leaf.shape).astype(leaf.dtype)
    return leaf + 0.5 * np.abs(leaf).mean() * noise


def last_number(leaf: np.ndarray) -> np.ndarray:
    changed = leaf.copy()
    for layer in changed if leaf.ndim > 1 else [changed]:
        layer.flat[-1] += 1e-5
    return changed
