"""Packing: every sample whole, once, its values back where they came from, shards balanced."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner_jax.packing import Packed, Sample, pack, row_bound
from learner_jax.shared_prompts import pack_shared
from runspec.core.errors import UserError

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30)
SETTINGS = settings(deadline=None, derandomize=True, max_examples=50)


def samples_of(lengths: list[tuple[int, int]]) -> list[Sample]:
    """Samples whose tokens are all different, so that a mix-up shows."""
    numbers = iter(range(1, 100_000))
    return [
        Sample(*(np.array([next(numbers) for _ in range(n)], np.int32) for n in pair))
        for pair in lengths
    ]


@SETTINGS
@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(18, 40))
def test_every_sample_is_there_once_and_its_values_come_back(lengths, rows, shards, tokens):
    # given any samples, when packed
    samples = samples_of(lengths)
    packed = pack(samples, tokens=tokens, rows=rows * shards, shards=shards)
    batch = packed.batch
    assert batch.tokens.shape == (packed.microbatches, rows * shards, tokens)
    # then the tokens of each lie together, numbered from 0, under a segment of their own
    found = []
    for row in np.ndindex(batch.tokens.shape[:2]):
        for segment in range(1, batch.segment_ids[row].max(initial=0) + 1):
            here = batch.segment_ids[row] == segment
            found.append(batch.tokens[row][here].tolist())
            assert batch.positions[row][here].tolist() == list(range(here.sum()))
    assert sorted(found) == sorted([*s.prompt.tolist(), *s.output.tolist()] for s in samples)
    padding = batch.segment_ids == 0
    assert not batch.tokens[padding].any() and not batch.positions[padding].any()
    # and the targets are the output tokens, each at the position before it
    aimed = batch.targets[..., :-1] >= 0
    np.testing.assert_array_equal(batch.targets[..., :-1][aimed], batch.tokens[..., 1:][aimed])
    assert (batch.targets[padding] == -1).all() and (batch.targets[..., -1] == -1).all()
    # and one value an output token lies where that token is the target, and is read back in order
    array = packed.scatter([sample.output.astype(np.float32) for sample in samples])
    np.testing.assert_array_equal(array, np.maximum(batch.targets, 0))
    for sample, values in zip(samples, packed.gather(array), strict=True):
        np.testing.assert_array_equal(values, sample.output)
    # and one number stands for every token of a sample
    counts = np.arange(1.0, 1.0 + len(samples))
    total = packed.scatter(list(counts)).sum()
    assert total == sum(count * len(s.output) for count, s in zip(counts, samples, strict=True))
    # and the same samples give the same rows
    again = pack(samples, tokens=tokens, rows=rows * shards, shards=shards)
    jax.tree.map(np.testing.assert_array_equal, batch, again.batch)


@SETTINGS
@given(LENGTHS, st.integers(18, 40), st.data())
def test_only_sampled_tokens_are_targets_and_have_values(lengths, tokens, data):
    # given samples in whose outputs the policy sampled some of the tokens, or all
    plain, samples = samples_of(lengths), []
    for sample in plain:
        n = len(sample.output)
        mask = data.draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n))
        samples.append(replace(sample, own=None if mask is None else np.array(mask, bool)))
    sampled = [s.output if s.own is None else s.output[s.own] for s in samples]
    # when packed, then the rows are the same, and of the targets those stay that were sampled
    packed, whole = (pack(some, tokens=tokens, rows=2) for some in (samples, plain))
    stay = np.isin(whole.batch.targets, np.concatenate(sampled))
    expected = replace(whole.batch, targets=np.where(stay, whole.batch.targets, -1))
    jax.tree.map(np.testing.assert_array_equal, packed.batch, expected)
    # and one value a sampled token lies where that token is the target
    array = packed.scatter([each.astype(np.float32) for each in sampled])
    np.testing.assert_array_equal(array, np.maximum(packed.batch.targets, 0))
    assert packed.scatter([1.0] * len(samples)).sum() == sum(map(len, sampled))
    # and gathering and scattering are inverse, both ways
    for values, each in zip(packed.gather(array), sampled, strict=True):
        np.testing.assert_array_equal(values, each)
    noise = np.random.default_rng(0).normal(size=array.shape)
    np.testing.assert_array_equal(packed.scatter(packed.gather(noise)), np.where(stay, noise, 0))


@SETTINGS
@given(LENGTHS, st.integers(18, 40))
def test_rows_are_those_of_first_fit_decreasing_and_no_more_than_the_bound(lengths, tokens):
    packed = pack(samples_of(lengths), tokens=tokens, rows=1)
    # given the plain search for the first row with room, the longest sample first
    sizes = [prompt + output for prompt, output in lengths]
    rows: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fits = (row for row in rows if sum(sizes[j] for j in row) + sizes[i] <= tokens)
        if (row := next(fits, None)) is None:
            rows.append(row := [])
        row.append(i)
    # then the same samples share a row
    together: dict[int, list[int]] = {}
    for i, place in enumerate(packed.placements):
        together.setdefault(place.microbatch, []).append(i)
    assert sorted(map(sorted, rows)) == sorted(together.values())
    assert packed.microbatches <= row_bound(len(sizes), max(sizes), tokens)


@SETTINGS
@given(LENGTHS, st.integers(1, 3), st.integers(1, 3), st.integers(18, 40), st.data())
def test_shared_prompts_need_no_more_microbatches_than_rows(lengths, rows, shards, tokens, data):
    # given samples of which some begin with the same prompt, and some have turns
    samples = samples_of(lengths)
    for number, sample in enumerate(samples):
        masks = st.lists(st.booleans(), min_size=(n := len(sample.output)), max_size=n)
        own = np.array(data.draw(masks | st.none()) or [True] * n)
        like = data.draw(st.integers(0, number))
        samples[number] = replace(sample, prompt=samples[like].prompt, own=own)
    longest = max(map(len, samples))
    if longest > tokens:
        return
    most = -(-row_bound(len(samples), longest, tokens) // (rows * shards))
    packed = pack_shared(
        samples, tokens=tokens, rows=rows * shards, shards=shards, microbatches=most
    )
    # then one value a target lies where it is asked for, and is read back in order
    sampled = [s.output[s.own].astype(np.float32) for s in samples]
    array = packed.scatter(sampled)
    np.testing.assert_array_equal(array, np.maximum(packed.batch.targets, 0))
    for values, each in zip(packed.gather(array), sampled, strict=True):
        np.testing.assert_array_equal(values, each)
    # and what is no padding is counted
    assert packed.used == (packed.batch.shared.seen.starts < rows * tokens).sum()


def row_lengths(packed: Packed) -> list[np.ndarray]:
    """Sample lengths of each row, in the order of the rows."""
    rows = packed.batch.segment_ids.reshape(-1, packed.batch.segment_ids.shape[-1])
    return [np.unique(row[row > 0], return_counts=True)[1] for row in rows]


def loads_of(rows: list[np.ndarray], microbatches: int, shards: int) -> np.ndarray:
    """[M, shards]: squared sample lengths of each shard's rows, summed."""
    costs = [float((row.astype(float) ** 2).sum()) for row in rows]
    return np.reshape(costs, (microbatches, shards, -1)).sum(axis=-1)


@SETTINGS
@given(LENGTHS, st.integers(1, 3), st.integers(2, 4))
def test_shards_wait_for_each_other_by_one_row_at_most(lengths, rows, shards):
    # given any lengths, when packed for some shards
    packed = pack(samples_of(lengths), tokens=18, rows=rows * shards, shards=shards)
    filled = row_lengths(packed)
    loads = loads_of(filled, packed.microbatches, shards)
    costliest = loads_of(filled, packed.microbatches, rows * shards).max()
    # then what the slowest shards take, microbatch by microbatch, is the mean and a row's cost
    assert loads.max(axis=1).sum() <= loads.sum() / shards + costliest


def test_a_fixed_number_of_microbatches_ends_in_padding():
    # given six samples that fill two microbatches, when four are asked for
    samples = samples_of([(2, 3)] * 6)
    packed = pack(samples, tokens=8, rows=3, microbatches=4)
    # then two hold them and the others hold nothing that is trained
    assert packed.microbatches == 2 and len(packed.batch.tokens) == 4
    assert (packed.batch.segment_ids[:2].max(axis=-1) == 1).all()
    assert not packed.batch.segment_ids[2:].any() and (packed.batch.targets[2:] == -1).all()
    # and two are enough, and one is not
    assert pack(samples, tokens=8, rows=3, microbatches=2).microbatches == 2
    with pytest.raises(UserError, match="6 samples of up to 5 tokens need 2 microbatches"):
        pack(samples, tokens=8, rows=3, microbatches=1)


@pytest.mark.parametrize(
    ("lengths", "kind", "message"),
    [
        ([(1, 2), (5, 7)], UserError, r"12 tokens, a packed row 10(.|\n)*at least 12"),
        ([], ValueError, "no samples"),
        ([(0, 2)], ValueError, "needs a prompt token and an output"),
    ],
)
def test_what_cannot_be_packed_is_refused(lengths, kind, message):
    with pytest.raises(kind, match=message):
        pack(samples_of(lengths), tokens=10, rows=2)
