"""A batch goes from process to process bit for bit, and nothing else passes for one."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner_jax.batch import Batch, TrainingRollout
from learner_jax.feed import decode_batch, encode_batch
from verify.formats.batch import BatchGroup, BatchManifest
from verify.formats.tables import MalformedTable

finite = st.floats(allow_nan=False, allow_infinity=False)
single = st.floats(allow_nan=False, allow_infinity=False, width=32)
tokens = st.lists(st.integers(0, 2**31 - 1), min_size=0, max_size=5)


@st.composite
def rollouts(draw: Any) -> TrainingRollout:
    output = draw(tokens)
    mu = draw(st.lists(single, min_size=len(output), max_size=len(output)))
    return TrainingRollout(
        problem_id=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
        prompt_tokens=np.asarray(draw(tokens), np.int32),
        output_tokens=np.asarray(output, np.int32),
        mu=np.asarray(mu, np.float32),
        advantage=draw(finite),
        task_reward=draw(finite),
        reward=draw(finite),
        target=draw(st.none() | st.integers(0, 2**31 - 1)),
        version=draw(st.integers(0, 99)),
    )


@st.composite
def batches(draw: Any) -> Batch:
    groups = draw(st.lists(st.lists(rollouts(), min_size=1, max_size=3), min_size=1, max_size=3))
    named = [BatchGroup(f"{i:064x}", "b" * 64, i, 5, 4) for i in range(len(groups))]
    stats = {"task_reward_mean": draw(finite), "by_target": {"8": 1.5}}
    return Batch(BatchManifest("run", 5, named, True, stats, 1, "0" * 64), groups)


def same(a: TrainingRollout, b: TrainingRollout) -> bool:
    return all(
        x.tobytes() == y.tobytes() and x.dtype == y.dtype if isinstance(x, np.ndarray) else x == y
        for x, y in zip(astuple(a), astuple(b), strict=True)
    )


@given(batches())
def test_every_bit_comes_back(batch: Batch) -> None:
    back = decode_batch(encode_batch(batch))
    assert back.manifest == batch.manifest and back.digest == batch.digest
    assert [len(group) for group in back.groups] == [len(group) for group in batch.groups]
    assert all(same(a, b) for a, b in zip(back.rollouts, batch.rollouts, strict=True))


@given(batches(), st.data())
def test_what_is_cut_or_has_more_is_refused(batch: Batch, data: Any) -> None:
    whole = encode_batch(batch)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for damaged in (whole[:cut], whole + b"\0"):
        with pytest.raises(MalformedTable):
            decode_batch(damaged)
