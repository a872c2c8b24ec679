"""Rollouts of few prompts, laid out so that each prompt is computed once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner_jax.prefill import prefill
from learner_jax.shared_prompts import (
    MOST_REPEATS,
    PrefillBatch,
    Shape,
    divide,
    halved,
    lay_out,
    predicting,
    shape_for,
)
from runspec.core.errors import UserError
from tests.learner_jax.conftest import VOCABULARY
from tests.learner_jax.test_prefill import TEMPERATURE, assert_alone, policy
from verify.plugins import PrefillInput

T = 32


def rollouts(groups: list[tuple[int, list[int]]]) -> list[PrefillInput]:
    """Of each group the prompt's length and the outputs' lengths, in mixed order."""
    rng = np.random.default_rng(0)
    made = []
    for length, counts in groups:
        prompt = rng.integers(0, VOCABULARY, length).astype(np.int32)
        made += [
            PrefillInput(prompt, rng.integers(0, VOCABULARY, n).astype(np.int32), (n, 7))
            for n in counts
        ]
    return [made[i] for i in rng.permutation(len(made))]


def read_back(batch: PrefillBatch, shard: int, rows: int) -> dict[tuple[int, int], list[int]]:
    """The tokens of each segment of a shard's rows, by row and number."""
    found: dict[tuple[int, int], list[int]] = {}
    for row in range(shard * rows, (shard + 1) * rows):
        for source, segment in zip(batch.rows.sources[row], batch.segment_ids[row], strict=True):
            if segment:
                found.setdefault((row, int(segment)), []).append(int(source))
    return found


GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 20), min_size=1, max_size=6)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, rows=st.integers(1, 4), shards=st.integers(1, 2))
def test_every_rollout_stands_in_a_row_whole_and_its_prompt_is_there_once(
    groups: list[tuple[int, list[int]]], rows: int, shards: int
) -> None:
    # given rollouts of any lengths, and their parts
    inputs = rollouts(groups)
    shape = shape_for(inputs, tokens=T, rows=rows)
    assert shape.rows <= MOST_REPEATS * rows
    parts = divide(inputs, shape)
    assert sorted(place.member for part in parts for place in part) == list(range(len(inputs)))
    for start in range(0, len(parts), shards):
        together = parts[start : start + shards]
        fit = halved(shape, together, inputs)
        # when they are laid out
        batch = lay_out(together, inputs, fit, shards)
        for shard, part in enumerate(together):
            segments = read_back(batch, shard, fit.rows)
            assert len(segments) == len(part)
            for number, place in enumerate(part, start=1):
                each = inputs[place.member]
                sources = segments[shard * fit.rows + place.row, number]
                # then its row holds prompt and output but for the last token, in order
                text = np.concatenate([each.prompt_tokens, each.output_tokens[:-1]])
                np.testing.assert_array_equal(batch.tokens[shard, sources], text)
                np.testing.assert_array_equal(batch.positions[shard, sources], np.arange(len(text)))
                # and what predicts the output are the prompt's last position and the output's own
                expected = sources[len(each.prompt_tokens) - 1 :]
                np.testing.assert_array_equal(predicting(place, each), expected)
                # and each position is read back from a place where it stands
                flat = batch.rows.sources[shard * fit.rows : (shard + 1) * fit.rows].reshape(-1)
                np.testing.assert_array_equal(flat[batch.rows.places[shard, sources]], sources)
            # and a prompt of the part is there once
            prompts = {p.prompt: inputs[p.member].prompt_tokens.tobytes() for p in part}
            assert len(set(prompts.values())) == len(prompts) == sum(p.first for p in part)


@pytest.mark.parametrize("devices", [1, 2])
def test_rollouts_that_share_prompts_get_what_each_would_get_alone(devices: int) -> None:
    # given groups of samples, among them outputs of one token and a prompt of one
    groups = [(17, [9, 1, 30, 12]), (1, [1, 1, 5]), (30, [20, 20, 3]), (8, [25] * 6)]
    inputs, subject = rollouts(groups), policy(devices)
    # when they are prefilled together
    outputs = prefill(subject, inputs, temperature=TEMPERATURE)
    # then each has the log-probs, gaps and states of the definition
    for output, rollout in zip(outputs, inputs, strict=True):
        assert_alone(output, subject, rollout)


def test_shared_prompts_take_fewer_positions() -> None:
    inputs = rollouts([(16, [8] * 8)])
    shape = shape_for(inputs, tokens=T, rows=4)
    assert len(divide(inputs, shape)) == 1
    assert shape == Shape(4 * T, 10, T)  # 184 tokens in rows, 72 positions: 2.6 times, so 2.5


def test_a_little_sharing_takes_no_more_rows_than_none() -> None:
    # given 16 long outputs of a short prompt: 0.9 % fewer positions than tokens in rows
    prompts = [np.full(40, 0, np.int32)] * 16, [np.full(40, n, np.int32) for n in range(16)]
    output = np.arange(4000, dtype=np.int32)
    shared, apart = ([PrefillInput(each, output, None) for each in some] for some in prompts)
    # when their parts are shaped
    shape = shape_for(shared, tokens=4096, rows=8)
    # then they have the rows that no sharing has, and are full of rollouts, one a row
    assert shape == shape_for(apart, tokens=4096, rows=8) == Shape(8 * 4096, 8, 4096)
    assert [len(part) for part in divide(shared, shape)] == [8, 8]


def test_parts_that_are_half_empty_are_halved() -> None:
    shape = Shape(4 * T, 4, T)
    inputs = rollouts([(10, [10]), (9, [20])])
    (part,) = divide(inputs, shape)
    assert halved(shape, [part], inputs) == Shape(2 * T, 2, T)
    inputs = rollouts([(10, [20] * 3)])
    assert halved(shape, divide(inputs, shape), inputs) == shape  # a row each


def test_prompts_are_parted_from_one_another() -> None:
    # given the same tokens, divided between prompt and output in two ways
    text = np.arange(9, dtype=np.int32)
    inputs = [PrefillInput(text[:n], text[n:], None) for n in (3, 5)]
    (part,) = divide(inputs, shape_for(inputs, tokens=T, rows=2))
    assert [place.first for place in part] == [True, True]
    for one, two in pairwise(sorted(part, key=lambda place: place.prompt)):
        assert one.output + len(inputs[one.member].output_tokens) - 1 == two.prompt


def test_what_cannot_be_laid_out_is_refused() -> None:
    empty = PrefillInput(np.zeros(0, np.int32), np.zeros(3, np.int32), None)
    with pytest.raises(ValueError, match="prompt token"):
        shape_for([empty], tokens=T, rows=1)
    long = PrefillInput(np.zeros(20, np.int32), np.zeros(13, np.int32), None)
    with pytest.raises(UserError, match="33 tokens"):
        shape_for([long], tokens=T, rows=1)
