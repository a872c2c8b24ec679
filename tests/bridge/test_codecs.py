"""Codecs of shares: bounded errors, exact sizes, the same bytes again, hostile bytes refused."""

import tracemalloc
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.tensors import LARGEST, SEGMENT, Kind, MalformedShare, codec

KINDS: list[Kind] = list(get_args(Kind))
SCALED = [kind for kind in KINDS if kind != "float32"]
BLOCK = {"float16": 1024, "sparse": 4096}
SCALE_BYTES = dict.fromkeys(BLOCK, 4) | {"sparse": 132}
ELEMENT_BYTES = {"float32": 4, "float16": 2, "sparse": 0}
"""Of the format, of a block and of an element."""
HALF_STEP = 2.0**-12
"""Largest error of an element of float16, in units of its block's largest."""


def vector(n: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    # Blocks of very different size, as the layers of a model are.
    sizes = np.exp(3 * rng.standard_normal(n // 100 + 1)).repeat(100)[:n]
    return (scale * sizes * rng.standard_normal(n)).astype(np.float32)


def block_maxima(x: np.ndarray, block: int) -> np.ndarray:
    """The largest |x| of the block of each element."""
    filled = np.pad(np.abs(x), (0, -len(x) % block)).reshape(-1, block)
    return filled.max(axis=1).repeat(block)[: len(x)]


def sparse_by_hand(x: np.ndarray) -> np.ndarray:
    """What a sparse share says, block by block and element by element."""
    out = np.zeros_like(x)
    for start in range(0, len(x), 4096):
        block = x[start : start + 4096]
        largest = np.abs(block).max()
        for at in np.argsort(-np.abs(block), kind="stable")[:LARGEST]:
            out[start + at] = round(7 * float(block[at]) / float(largest)) / 7 * largest
    return out


@pytest.mark.parametrize("n", [1, 63, 4096, 4097, 30_001])
@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_of_any_length_comes_back_within_the_codecs_error(kind, n):
    x, each = vector(n), codec(kind)
    data = each.encode(x)
    blocks = -(-n // BLOCK[kind]) if kind in BLOCK else 0
    bytes_of = ELEMENT_BYTES[kind] * n + SCALE_BYTES.get(kind, 0) * blocks
    assert len(data) == each.size(n) == bytes_of
    y = each.decode(data, n)
    assert y.dtype == np.float32
    if kind == "float32":
        np.testing.assert_array_equal(x, y)
    elif kind == "sparse":
        np.testing.assert_allclose(y, sparse_by_hand(x), rtol=1e-6)
    else:
        error = np.abs(x - y)
        assert (error <= 1.00001 * HALF_STEP * block_maxima(x, BLOCK[kind])).all()


def test_bytes_lie_as_the_format_says():
    # given a block of each codec, whose elements and scales are exact
    x = np.zeros(1024, np.float32)
    x[[0, 1, 2]] = [127.0, -1.0, 2.5]
    half = codec("float16").encode(x)
    assert np.frombuffer(half, "<f4", 1) == 127
    assert np.frombuffer(half, "<f2", offset=4)[0] == 1
    # and of a sparse share 61 zeros come first, then the elements at 1021, 1022 and 1023
    sparse = np.frombuffer(codec("sparse").encode(14 * x[::-1].clip(-1, 2)), "<u2", offset=4)
    values = [8] * 61 + [8 + 7, 8 - 4, 8 + 7]
    assert sparse.tolist() == [
        at << 4 | value for at, value in zip([*range(61), 1021, 1022, 1023], values, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_segments_do_not_show(kind):
    # given a vector longer than a segment, then each segment decodes as it does alone
    x, each = vector(SEGMENT + 5000), codec(kind)
    y = each.decode(each.encode(x), len(x))
    for part in (slice(SEGMENT), slice(SEGMENT, None)):
        np.testing.assert_array_equal(y[part], each.decode(each.encode(x[part]), len(x[part])))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_bounded_by_the_result_and_a_segment(kind):
    x, each = vector(8 * SEGMENT), codec(kind)
    tracemalloc.start()
    data = each.encode(x)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    for _, part in each.parts(data, len(x)):
        del part
    decoding = tracemalloc.get_traced_memory()[1] - len(data)
    tracemalloc.stop()
    # Encoded segments are joined: twice their size.
    assert most < 2 * len(data) + 8 * 4 * SEGMENT
    assert decoding < 8 * 4 * SEGMENT


@pytest.mark.parametrize("kind", SCALED)
def test_tiny_blocks_are_zero_and_huge_ones_are_exact_enough(kind):
    each = codec(kind)
    # given blocks whose scale would be subnormal, and blocks of very large elements
    tiny = np.full(4096, 1e-44, np.float32)
    np.testing.assert_array_equal(each.decode(each.encode(tiny), 4096), 0)
    huge = np.zeros(4096, np.float32)
    huge[::64] = 1e38
    found = each.decode(each.encode(huge), 4096)
    np.testing.assert_allclose(found, huge, rtol=1e-6)


def test_equal_elements_are_taken_in_their_order():
    # given many equal ones, and a few larger ones at the end
    x = np.ones(3 * 4096, np.float32)
    x[4096 - 3 : 4096] = -2
    x[2 * 4096 :] = 0
    found = codec("sparse").decode(codec("sparse").encode(x), len(x)).reshape(3, 4096)
    # then the larger ones are there, and of the equal ones the first
    assert (found[0, -3:] == -2).all() and (found[0, :61] != 0).all()
    assert np.count_nonzero(found[0]) == LARGEST
    assert (found[1, :64] == 1).all() and np.count_nonzero(found[1]) == LARGEST
    assert not found[2].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_not_finite_are_refused(kind, value):
    each = codec(kind)
    x = vector(5000)
    data = bytearray(each.encode(x))
    x[4500] = value
    with pytest.raises(MalformedShare, match="not finite"):
        each.encode(x)
    # and from others: as a scale, or as a value
    sent = [np.array([value], "<f4").tobytes() + data[4:]]
    if kind == "float16":
        sent.append(data[:-2] + np.array([value], "<f2").tobytes())
    for each_sent in sent:
        with pytest.raises(MalformedShare, match="not finite"):
            each.decode(bytes(each_sent), 5000)


@pytest.mark.parametrize("kind", KINDS)
def test_another_length_and_indices_that_do_not_rise_are_refused(kind):
    each = codec(kind)
    data = each.encode(vector(5000))
    for wrong in (b"", data[:-1], data + b"\0"):
        with pytest.raises(MalformedShare, match=rf"5000 elements as {kind} has {len(data)} bytes"):
            each.decode(wrong, 5000)
    if kind == "sparse":
        data = each.encode(vector(4096))
        with pytest.raises(MalformedShare, match="do not rise"):
            each.decode(data[:6] + data[4:6] + data[8:], 4096)


@settings(derandomize=True, max_examples=200)
@given(st.sampled_from(KINDS), st.integers(1, 300), st.data())
def test_any_bytes_decode_to_finite_numbers_or_are_refused(kind, n, draw):
    each = codec(kind)
    data = draw.draw(st.binary(min_size=each.size(n), max_size=each.size(n)))
    try:
        x = each.decode(data, n)
    except MalformedShare:
        return
    assert x.shape == (n,) and np.isfinite(x).all()
