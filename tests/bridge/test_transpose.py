"""Copies between orders of dimensions, against numpy's own."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.tensors import contiguous, copy_into

DTYPES = [np.float32, ml_dtypes.bfloat16]


@st.composite
def shapes_and_orders(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 140]), min_size=1, max_size=3))
    order = st.permutations(range(len(shape)))
    return shape, draw(order), draw(order)


def laid(shape: list[int], order: list[int], dtype: type) -> np.ndarray:
    """An empty array whose dimensions lie in memory in an order, in the middle of a larger one."""
    outer = np.empty([shape[axis] + 2 for axis in order], dtype)
    return outer[(slice(1, -1),) * len(shape)].transpose(np.argsort(order))


@settings(deadline=None)
@given(shapes_and_orders(), st.sampled_from(DTYPES))
def test_a_copy_is_the_array(case: tuple[list[int], list[int], list[int]], dtype: type) -> None:
    # given an array and room for it, each in its own order
    shape, first, second = case
    source, target = laid(shape, first, dtype), laid(shape, second, dtype)
    source[...] = np.random.default_rng(0).normal(size=shape)
    # when it is copied, then all of it is there, and as C-contiguous too
    copy_into(target, source)
    np.testing.assert_array_equal(target, source)
    np.testing.assert_array_equal(contiguous(source), source)
    assert contiguous(source).flags.c_contiguous


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_the_buffer_has_and_every_bit_pattern(dtype: type) -> None:
    # given numbers that are not a number, infinite and signed zeros among them
    size = np.dtype(dtype).itemsize
    bits = np.random.default_rng(0).integers(0, 256, (9000, 3 * size), np.uint8)
    source = bits.view(dtype)
    # when they are transposed, then their bits stay
    copied = contiguous(source.T)
    np.testing.assert_array_equal(copied.view(f"u{size}"), source.view(f"u{size}").T)


def test_what_lies_in_order_is_not_copied() -> None:
    array = np.zeros((3, 4), np.float32)
    assert contiguous(array) is array
