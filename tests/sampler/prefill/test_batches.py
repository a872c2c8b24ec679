"""Which rollouts share a batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sampler.prefill.states import batches_by_length


@given(st.lists(st.integers(2, 60), max_size=50), st.integers(1, 200))
def test_every_rollout_is_in_one_batch_within_the_bound(lengths: list[int], positions: int) -> None:
    batches = list(batches_by_length(lengths, positions=positions))
    assert sorted(number for batch in batches for number in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[number] for number in batch)
        assert len(batch) == 1 or len(batch) * longest <= positions
    # and none of a later batch is longer than one of an earlier
    order = [lengths[number] for batch in batches for number in batch]
    assert order == sorted(order, reverse=True)
