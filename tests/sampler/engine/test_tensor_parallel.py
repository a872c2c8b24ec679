"""Two ranks on two cores: each loads, checks and computes with its own slices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from runspec.core.errors import UserError
from sampler.engine.engine import Engine
from tests.sampler.engine.agreement import assert_samples
from tests.sampler.engine.conftest import cpu_pool
from tests.sampler.engine.models import perturbed_version
from tests.sampler.engine.requests import batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a rank needs a core of its own"),
]


@pytest.fixture(scope="module")
def engine(untied) -> Iterator[Engine]:
    with closing(Engine(cpu_pool(tensor=2))) as engine:
        engine.load(untied, 0)
        yield engine


def test_every_rank_has_the_new_weights_after_a_reload(engine, untied, tmp_path):
    newer = perturbed_version(untied, tmp_path / "v1", "gate_proj.weight")

    engine.load(newer, 1)

    assert_samples(engine, newer, batch())


def test_a_stale_slice_on_the_last_rank_alone_is_named(engine, untied, tmp_path):
    engine.load(untied, 0)
    newer = perturbed_version(
        untied, tmp_path / "v2", "q_proj.bias", scale=1e-5, rows=slice(-1, None)
    )

    with pytest.raises(UserError, match=r"version 2.*layers.0.self_attn.q_proj.bias"):
        engine.check(newer, 2)
