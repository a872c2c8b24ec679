"""Rows of engine steps become rows of output tokens, whatever else the engine computed."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest


@pytest.fixture
def recorder():
    from sampler.engine.recorder import TokenRecorder

    return TokenRecorder()


def record(recorder, rows):
    """Rows (slot, position, token); log-prob and hidden state are told from the token."""
    import torch

    slots, positions, tokens = (np.array(column) for column in zip(*rows, strict=True))
    values = torch.tensor(tokens, dtype=torch.float32)
    recorder.record(
        slots, positions, torch.tensor(tokens), -values, values[:, None].repeat(1, 3) + 0.001
    )


def taken(recorder, lengths):
    recorded = recorder.take(lengths)
    return (
        np.frombuffer(recorded.tokens, np.int32).tolist(),
        np.frombuffer(recorded.logprobs, np.float32).tolist(),
        np.frombuffer(recorded.hidden, np.uint16).view(ml_dtypes.bfloat16).astype(np.float32),
    )


def test_rows_come_back_by_slot_and_position_with_hidden_states_rounded_to_bf16(recorder):
    record(recorder, [(1, 0, 10), (0, 0, 20)])
    record(recorder, [(0, 1, 21), (1, 1, 11)])

    tokens, logprobs, hidden = taken(recorder, [2, 2])

    assert tokens == [20, 21, 10, 11]
    assert logprobs == [-20.0, -21.0, -10.0, -11.0]
    assert hidden.tolist() == [20.0] * 3 + [21.0] * 3 + [10.0] * 3 + [11.0] * 3


def test_the_last_row_of_a_position_counts(recorder):
    """Chunks of a prefill sample tokens that are thrown away; a preempted request starts again."""
    record(recorder, [(0, 0, 5), (1, 0, 1)])
    record(recorder, [(0, 0, 6), (1, 1, 2)])
    record(recorder, [(0, 1, 7), (1, 1, 3)])

    assert taken(recorder, [2, 2])[0] == [6, 7, 1, 3]


def test_rows_past_the_end_are_left_out(recorder):
    record(recorder, [(0, 0, 5), (1, 0, 8)])
    record(recorder, [(0, 1, 6), (1, 1, 9)])

    assert taken(recorder, [1, 2])[0] == [5, 8, 9]


def test_a_token_without_a_row_is_an_error(recorder):
    record(recorder, [(0, 0, 5), (0, 2, 7)])

    with pytest.raises(RuntimeError, match="1 sampled tokens were not recorded"):
        recorder.take([3])


def test_nothing_is_left_after_take_or_clear(recorder):
    record(recorder, [(0, 0, 5)])
    recorder.clear()
    record(recorder, [(0, 0, 6)])

    assert taken(recorder, [1])[0] == [6]
    with pytest.raises(RuntimeError):
        recorder.take([1])


def test_no_requests_no_rows(recorder):
    recorded = recorder.take([])

    assert (recorded.tokens, recorded.logprobs, recorded.hidden) == (b"", b"", b"")
