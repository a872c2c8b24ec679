"""One segment: found changes, coded, decoded."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bridge.delta.changes import changed_indices
from bridge.delta.segments import encode, overwrite

TYPES = st.sampled_from([np.uint16, np.uint32])


@given(
    dtype=TYPES,
    elements=st.integers(0, 3000),
    share=st.sampled_from([0, 0.001, 0.02, 0.04, 0.1, 0.5, 1]),
    seed=st.integers(0, 2**32),
    skew=st.integers(0, 3),
)
def test_changes_are_those_that_numpy_sees(
    dtype: type, elements: int, share: float, seed: int, skew: int
) -> None:
    # Given arrays that begin anywhere within a word
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 2**16, elements + skew).astype(dtype)[skew:]
    new = old.copy()
    new[rng.random(elements) < share] ^= dtype(1 << rng.integers(0, 8 * new.itemsize))
    # When, then
    assert np.array_equal(changed_indices(old, new), np.flatnonzero(old != new))


@given(
    dtype=TYPES,
    gaps=st.lists(
        st.one_of(st.integers(0, 5), st.sampled_from([253, 254, 255, 256, 509, 510, 511, 2000])),
        max_size=60,
    ),
    after=st.integers(0, 600),
    seed=st.integers(0, 2**32),
)
def test_any_gaps(dtype: type, gaps: list[int], after: int, seed: int) -> None:
    # Given changes after gaps around the length that one byte can say
    rng = np.random.default_rng(seed)
    where = np.cumsum([gap + 1 for gap in gaps], dtype=np.intp) - 1
    old = rng.integers(0, 2**16, sum(gaps) + len(gaps) + after).astype(dtype)
    new = old.copy()
    new[where] = ~new[where]
    # When
    coded = encode(new, where)
    read = overwrite(old, memoryview(coded + b"what follows"))
    # Then
    assert np.array_equal(old, new)
    assert read == len(coded)
