"""Rows of engine steps become the record of each sequence, whatever else the engine computed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runspec.estimate.speed import RECORDED_ROWS
from sampler.engine.requests import split_recorded
from sampler.engine.sampling import (
    RING,
    STEPS,
    TokenRecorder,
    by_partition,
    by_topk,
    select_largest,
)
from verify.toploc import CHUNK_ROWS, TOP_K, build_proofs, build_proofs_of, select

SLOTS, LONGEST, HIDDEN = 4, 100, 8


def new_recorder(hidden=HIDDEN):
    return TokenRecorder(SLOTS, LONGEST, hidden, torch.device("cpu"))


def state_of(token, hidden=HIDDEN):
    """The hidden state that goes with a token, as u16 bits; no magnitude comes twice in a chunk."""
    place = token * hidden + np.arange(hidden)
    signs = (place % 3 == 0).astype(np.uint16) << 15
    return (place * 12347 % 0x7F00).astype(np.uint16) | signs


def bits_of(states):
    return states.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def record(recorder, rows, hidden=HIDDEN):
    """Rows (slot, position, token); log-prob and hidden state are told from the token."""
    slots, positions, tokens = (np.array(column) for column in zip(*rows, strict=True))
    states = np.stack([state_of(int(token), hidden) for token in tokens]).view(np.int16)
    recorder.record(
        slots,
        positions,
        torch.from_numpy(tokens),
        -torch.from_numpy(tokens).float(),
        torch.from_numpy(states).view(torch.bfloat16),
    )


def write_all(recorder, slot, tokens, hidden=HIDDEN):
    for position, token in enumerate(tokens):
        record(recorder, [(slot, position, token)], hidden)


def taken(recorder, slot, length):
    (found,) = split_recorded(recorder.take([slot], [length]), [length], ["length"])
    return found


def proofs_of_tokens(tokens, hidden=HIDDEN):
    return build_proofs(np.stack([state_of(token, hidden) for token in tokens]))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 95, LONGEST])
@pytest.mark.parametrize("hidden", [1, 3, HIDDEN, 64])
def test_selections_make_the_proofs_of_all_hidden_states(length, hidden):
    recorder, tokens = new_recorder(hidden), list(range(1000, 1000 + length))
    write_all(recorder, 2, tokens, hidden)

    found = taken(recorder, 2, length)

    assert found.selection.sizes.sum() == length * hidden
    assert build_proofs_of([found.selection]) == [proofs_of_tokens(tokens, hidden)]


def test_a_step_may_overwrite_the_outputs_of_the_one_before():
    """A graph's outputs lie where those of its last replay lay. Of equal magnitudes the earlier
    position is selected."""
    steps, hidden = 70, 16
    recorder = TokenRecorder(2, steps, hidden, torch.device("cpu"))
    generator = np.random.default_rng(0)
    # five magnitudes, and both signs: many equals at the edge of the selection
    values = generator.integers(1, 6, (steps, hidden)) * generator.choice([-1, 1], (steps, hidden))
    states = torch.from_numpy(values).to(torch.bfloat16)
    tokens, logprobs, last = torch.zeros(1, dtype=torch.int64), torch.zeros(1), states[:1].clone()
    for position in range(steps):
        tokens.fill_(position)
        logprobs.fill_(-float(position))
        last.copy_(states[position])
        recorder.record(np.array([1]), np.array([position]), tokens, logprobs, last)
    last.zero_()

    found = taken(recorder, 1, steps)

    assert found.output_tokens.tolist() == list(range(steps))
    assert found.logprobs.tolist() == [-float(position) for position in range(steps)]
    assert build_proofs_of([found.selection]) == [build_proofs(bits_of(states))]


def test_a_row_past_the_longest_output_is_left_out():
    recorder, tokens = new_recorder(), list(range(LONGEST))
    write_all(recorder, 0, [*tokens, 900, 901])

    assert taken(recorder, 0, LONGEST).output_tokens.tolist() == tokens


def test_a_token_without_a_row_is_an_error():
    recorder = new_recorder()
    record(recorder, [(0, 0, 5)])
    record(recorder, [(0, 2, 7)])
    with pytest.raises(RuntimeError, match="sampled tokens were not recorded"):
        recorder.take([0], [3])
    # as is one that was set back beyond the ring
    write_all(recorder, 1, range(60))
    record(recorder, [(1, 20, 7)])
    with pytest.raises(RuntimeError, match="not recorded"):
        recorder.take([1], [21])


@pytest.mark.parametrize("free", [lambda r: r.take([0], [40]), lambda r: r.forget([0])])
def test_a_slot_is_as_new_after_take_or_forget(free):
    recorder = new_recorder()
    write_all(recorder, 0, range(40))

    free(recorder)

    with pytest.raises(RuntimeError, match="1 sampled tokens were not recorded"):
        recorder.take([0], [1])
    write_all(recorder, 0, range(500, 534))
    found = taken(recorder, 0, 34)
    assert build_proofs_of([found.selection]) == [proofs_of_tokens(range(500, 534))]


def test_the_estimate_of_memory_knows_the_ring_and_the_buffers():
    assert RING + STEPS == RECORDED_ROWS


@settings(max_examples=60, derandomize=True)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 90))
def test_any_schedule_records_what_a_list_of_all_rows_does(seed, steps):
    """Sequences come and go in slots, wait, are set back a row or to junk of a chunked prefill."""
    draw = random.Random(seed)
    recorder, plain, token = new_recorder(), {slot: [] for slot in range(SLOTS)}, 0
    for _ in range(steps):
        recorder.version = draw.randrange(3)
        rows = []
        for slot in range(SLOTS):
            length = len(plain[slot])
            what = draw.random()
            if what < 0.1:
                continue  # preempted, or not scheduled
            if what < 0.12 and length:
                kept = draw.randint(max(0, length - 2), length)
                compare(recorder, plain, slot, kept)
                length = 0
            # Back by one: a token in flight was discarded, or a prefill goes on.
            position = max(0, length - 1) if 0.12 <= what < 0.3 else length
            token += 1
            rows.append((slot, position, token))
            plain[slot][position:] = [(token, recorder.version)]
        if rows:
            record(recorder, draw.sample(rows, len(rows)))
    for slot in range(SLOTS):
        compare(recorder, plain, slot, len(plain[slot]))


def compare(recorder, plain, slot, length):
    """Takes a sequence from both; the slot is free afterwards."""
    rows = plain[slot][:length]
    found = taken(recorder, slot, length)
    plain[slot] = []
    assert found.output_tokens.tolist() == [token for token, _ in rows]
    assert found.versions.tolist() == [version for _, version in rows]
    if rows:
        expected = proofs_of_tokens([token for token, _ in rows])
        assert build_proofs_of([found.selection]) == [expected]


@pytest.mark.parametrize("distinct", [2, 50, 0x7F00])
@pytest.mark.parametrize("hidden", [2, 8, 64, 512])
def test_both_ways_select_what_the_validator_selects(hidden, distinct):
    # given bf16 [C, 32, D] with so many magnitudes, of both signs, of which so many rows count
    rng, rows_of = np.random.default_rng(hidden), np.array([32, 32, 1, 7, 31])
    raw = rng.integers(0, distinct, (len(rows_of), CHUNK_ROWS, hidden)) * (0x7F00 // distinct)
    raw |= rng.integers(0, 2, raw.shape) << 15
    chunks = torch.from_numpy(raw.astype(np.uint16).view(np.int16)).view(torch.bfloat16)

    whole = [way(chunks, rows_of) for way in (by_topk, by_partition, select_largest)]

    for row, rows in enumerate(rows_of):
        count = min(TOP_K, rows * hidden)
        bits = bits_of(chunks[row, :rows].reshape(-1))
        expected = select([bits]).indices[0, :count]
        for selected in whole:
            assert selected.indices.shape == selected.bits.shape == (len(rows_of), TOP_K)
            pairs = (selected.indices[row, :count].tolist(), selected.bits[row, :count].tolist())
            assert set(zip(*pairs, strict=True)) == {
                (int(i), int(bits.view(np.int16)[i])) for i in expected
            }
