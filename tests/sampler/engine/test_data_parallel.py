"""Two copies of the model in one engine: both sample, both are loaded and checked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from sampler.engine.engine import Engine
from tests.sampler.engine.agreement import assert_samples
from tests.sampler.engine.conftest import cpu_pool
from tests.sampler.engine.models import perturbed_version
from tests.sampler.engine.requests import WAIT_S, batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a rank needs a core of its own"),
]


@pytest.fixture(scope="module")
def copies(untied: Path) -> Iterator[Engine]:
    with closing(Engine(cpu_pool(parallel={"data": 2}))) as engine:
        engine.load(untied, 0)
        yield engine


def test_both_copies_sample_from_the_version_loaded_last(copies: Engine, untied, tmp_path) -> None:
    newer = perturbed_version(untied, tmp_path / "v1", "gate_proj.weight")
    requests = batch(2, 4)  # placed in turn

    copies.load(newer, 1)

    assert copies.capacity == 512
    for result in assert_samples(copies, newer, requests):
        assert set(result.versions) == {1}


def test_abort_reaches_both(copies: Engine, untied) -> None:
    copies.load(untied, 0)
    expected = copies.submit(batch()).result(WAIT_S)
    copies.submit(batch(20, 16))

    copies.abort()

    found = copies.submit(batch()).result(WAIT_S)
    assert [r.output_tokens.tolist() for r in found] == [r.output_tokens.tolist() for r in expected]


def test_both_are_checked(copies: Engine, untied, tmp_path) -> None:
    copies.load(untied, 0)
    newer = perturbed_version(untied, tmp_path / "v2", "q_proj.bias", scale=1e-5, probe=False)

    with pytest.raises(UserError, match=r"version 2.*layers.0.self_attn.q_proj.bias"):
        copies.check(newer, 2)
