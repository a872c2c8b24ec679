"""Packing: every sample whole, once, and its values back where they came from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner_jax.packing import Sample, pack
from runspec.common.errors import UserError

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30)


def samples_of(lengths: list[tuple[int, int]]) -> list[Sample]:
    """Samples whose tokens are all different, so that a mix-up shows."""
    numbers = iter(range(1, 10_000))
    return [
        Sample(*(np.array([next(numbers) for _ in range(n)], np.int32) for n in pair))
        for pair in lengths
    ]


@settings(deadline=None, max_examples=50)
@given(LENGTHS, st.integers(1, 4))
def test_every_sample_is_there_once_and_whole(lengths: list[tuple[int, int]], rows: int) -> None:
    # given any samples, when packed
    samples = samples_of(lengths)
    packed = pack(samples, tokens=20, rows=rows)
    batch = packed.batch
    # then the tokens of each lie together, numbered from 0, under a segment of their own
    found = []
    for row in np.ndindex(batch.tokens.shape[:2]):
        for segment in range(1, batch.segment_ids[row].max(initial=0) + 1):
            here = batch.segment_ids[row] == segment
            found.append(batch.tokens[row][here].tolist())
            assert batch.positions[row][here].tolist() == list(range(here.sum()))
            assert batch.targets[row][here].tolist() == [*found[-1][1:], 0]
    assert sorted(found) == sorted([*s.prompt.tolist(), *s.output.tolist()] for s in samples)
    assert not batch.tokens[batch.segment_ids == 0].any()
    assert batch.tokens.shape == (packed.microbatches, rows, 20)


@settings(deadline=None, max_examples=50)
@given(LENGTHS)
def test_values_come_back_to_their_sample(lengths: list[tuple[int, int]]) -> None:
    samples = samples_of(lengths)
    packed = pack(samples, tokens=18, rows=2)
    # given one value an output token: the token itself
    array = packed.scatter([sample.output.astype(np.float32) for sample in samples])
    # then it lies where that token is the target, and nowhere else
    np.testing.assert_array_equal(array[array > 0], packed.batch.targets[array > 0])
    assert (array > 0).sum() == sum(len(sample.output) for sample in samples)
    # and is read back in order
    for sample, values in zip(samples, packed.gather(array), strict=True):
        np.testing.assert_array_equal(values, sample.output)


def test_rows_are_filled_by_the_longest_first() -> None:
    # given lengths that fill two rows exactly when the long ones go first
    packed = pack(samples_of([(1, 2), (1, 3), (3, 4), (2, 4)]), tokens=10, rows=1)
    assert packed.microbatches == 2
    assert (packed.batch.segment_ids > 0).all()


def test_one_number_stands_for_every_token_of_a_sample() -> None:
    packed = pack(samples_of([(2, 3), (1, 1)]), tokens=8, rows=1)
    assert packed.scatter([0.5, 2.0]).sum() == 3 * 0.5 + 2.0


def test_a_sample_longer_than_a_row_is_refused() -> None:
    with pytest.raises(UserError, match=r"12 tokens, a packed row 10(.|\n)*at least 12"):
        pack(samples_of([(1, 2), (5, 7)]), tokens=10, rows=2)


@pytest.mark.parametrize("lengths", [[], [(0, 2)], [(2, 0)]])
def test_nothing_to_predict_is_refused(lengths: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"no samples|needs a prompt token and an output"):
        pack(samples_of(lengths), tokens=10, rows=2)
