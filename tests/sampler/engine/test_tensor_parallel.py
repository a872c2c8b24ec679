"""Two ranks on two cores: each loads, checks and computes with its own slices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from runspec.common.errors import UserError
from sampler.engine.engine import Engine
from tests.sampler.engine.conftest import cpu_pool
from tests.sampler.engine.models import Reference, perturbed_version
from tests.sampler.engine.requests import WAIT_S, batch

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
    requests = batch()

    engine.load(newer, 1)

    reference = Reference(newer)
    for request, result in zip(requests, engine.submit(requests).result(WAIT_S), strict=True):
        expected, _ = reference.logprobs(list(request.prompt_tokens), result.output_tokens.tolist())
        assert np.abs(result.logprobs - expected).mean() < 1e-5


def test_a_stale_slice_on_the_last_rank_alone_is_named(engine, untied, tmp_path):
    engine.load(untied, 0)
    newer = perturbed_version(
        untied, tmp_path / "v2", "q_proj.bias", scale=1e-5, rows=slice(-1, None)
    )

    with pytest.raises(UserError, match=r"version 2.*layers.0.self_attn.q_proj.bias"):
        engine.check(newer, 2)
