"""A trusted pool takes over a version in the middle of rollouts, any other pool when it is idle."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from runspec.core.errors import UserError
from sampler.engine.engine import Engine
from sampler.engine.requests import Sampled, SampleRequest
from tests.sampler.engine.agreement import assert_samples
from tests.sampler.engine.conftest import cpu_pool
from tests.sampler.engine.models import END_TOKEN, Reference, perturbed_version
from tests.sampler.engine.requests import WAIT_S, batch
from tests.waiting import eventually
from verify.noise import noise_key

pytestmark = pytest.mark.slow
GROUP = "gate_proj.weight"


@pytest.fixture(scope="module")
def trusted(untied: Path) -> Iterator[Engine]:
    pool = cpu_pool(in_flight_updates=True, trust="trusted")
    with closing(Engine(pool)) as engine:
        engine.load(untied, 0)
        yield engine


@pytest.fixture(scope="module")
def newer(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed_version(untied, tmp_path_factory.mktemp("newer") / "v1", GROUP)


def under_way(engine: Engine, requests: list[SampleRequest]):
    future = engine.submit(requests)
    eventually(lambda: engine.running < len(requests), "a sequence ends", deadline_s=WAIT_S)
    return future


@torch.no_grad()
def computed_by_both(
    old: Reference, new: Reference, prompt: list[int], result: Sampled
) -> np.ndarray:
    """f32 [n]: log-probs of the output where the weights changed in its middle."""
    tokens = torch.tensor([[*prompt, *result.output_tokens.tolist()]])
    before = len(prompt) - 1 + int((result.versions == 0).sum())
    first = old._model(tokens[:, :before], use_cache=True)
    last = new._model(tokens[:, before:], past_key_values=first.past_key_values)
    logits = torch.cat([first.logits, last.logits], dim=1)[0, len(prompt) - 1 : -1]
    chosen = torch.arange(len(logits)), torch.tensor(result.output_tokens.tolist())
    return logits.log_softmax(-1)[chosen].numpy()


def test_each_token_has_the_version_that_sampled_it(trusted: Engine, untied, newer) -> None:
    # given sequences in the middle of version 0
    trusted.load(untied, 0)
    requests = batch(16, 16)
    future = under_way(trusted, requests)
    # when version 1 is loaded
    report = trusted.load(newer, 1)
    # then what was under way has tokens of both, in order
    sampled = future.result(WAIT_S)
    assert all((np.diff(result.versions) >= 0).all() for result in sampled)
    mixed = [
        (request.prompt_tokens, result)
        for request, result in zip(requests, sampled, strict=True)
        if set(result.versions) == {0, 1}
    ]
    assert mixed
    # each computed by that version, the later ones from the keys and values of the earlier
    for prompt, result in mixed[:: len(mixed) // 6 + 1]:
        expected = computed_by_both(Reference(untied), Reference(newer), list(prompt), result)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    # and its pause is told
    assert 0 < report.pause_s <= report.load_s


def test_a_bad_version_in_flight_fails_what_was_under_way(
    trusted: Engine, untied, newer, tmp_path
) -> None:
    # given sequences under way, and a version whose probe speaks of other weights
    trusted.load(untied, 0)
    bad = perturbed_version(newer, tmp_path / "bad", "v_proj.weight", probe=False)
    future = under_way(trusted, batch(16, 16))
    # when it is loaded
    with pytest.raises(UserError, match="version 2") as error:
        trusted.load(bad, 2)
    # then nothing comes out of it, and nothing can be submitted
    assert future.exception(WAIT_S) is error.value
    assert trusted.version is None
    with pytest.raises(RuntimeError, match="no version"):
        trusted.submit(batch(1, 1))
    # and a good version makes the engine whole
    trusted.load(untied, 0)
    assert len(trusted.submit(batch(1, 1)).result(WAIT_S)) == 1


def test_an_untrusted_pool_refuses_a_load_under_way(engine: Engine, newer) -> None:
    future = engine.submit(batch(16, 16))

    with pytest.raises(RuntimeError, match="under way during a load"):
        engine.load(newer, 1)

    assert {0} == {v for result in future.result(WAIT_S) for v in result.versions}


def test_a_prefix_cached_under_one_version_is_not_used_under_the_next(
    trusted: Engine, untied, newer
) -> None:
    # given a prompt of more than a block, cached under version 0 in an engine that stays busy
    prompt = np.random.default_rng(8).integers(2, 190, 70).tolist()
    keys = [noise_key(b"\x06" * 32, 0, sample) for sample in (0, 1)]
    requests = [SampleRequest(prompt, 8, END_TOKEN, 1.0, key) for key in keys]
    trusted.load(untied, 0)
    trusted.submit(requests).result(WAIT_S)
    future = under_way(trusted, batch(16, 16))
    # when the next version is loaded in flight, and the prompt is sampled again
    trusted.load(newer, 1)
    # then its keys and values are the new version's
    assert_samples(trusted, newer, requests)
    future.result(WAIT_S)


def test_where_the_version_held_is_gone_all_is_loaded(engine: Engine, untied, tmp_path) -> None:
    # given an engine that holds a version whose files are gone
    gone = perturbed_version(untied, tmp_path / "gone", GROUP)
    engine.load(gone, 1)
    shutil.rmtree(gone)
    # when another is loaded, then it is loaded whole
    assert not engine.load(untied, 2).patched
