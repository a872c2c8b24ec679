"""Retention over drawn histories of anchors and deltas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broadcast.retention import kept

History = tuple[dict[int, int | None], set[int]]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Bases and anchors of 1 to 40 versions as publishers make them: the first is an anchor, every
    other an anchor, an anchor with a delta, or a delta from some version before it."""
    bases: dict[int, int | None] = {}
    anchors: set[int] = set()
    for version in sorted(draw(st.sets(st.integers(0, 100), min_size=1, max_size=40))):
        before = sorted(bases)
        bases[version] = draw(st.none() | st.sampled_from(before[-3:])) if before else None
        if bases[version] is None or draw(st.integers(0, 5)) == 0:
            anchors.add(version)
    return bases, anchors


def chain(version: int, bases: dict[int, int | None], anchors: set[int]) -> set[int]:
    """All that a version is rebuilt from, itself included."""
    base = bases[version]
    if version in anchors:
        return {version}
    assert base is not None
    return {version} | chain(base, bases, anchors)


keep_counts = st.integers(1, 6)
pins = st.lists(st.integers(0, 100), unique=True, max_size=20)


@given(history=histories(), keep=keep_counts, pinned=pins)
def test_every_kept_version_is_rebuilt_from_kept_ones(
    history: History, keep: int, pinned: list[int]
) -> None:
    bases, anchors = history
    result = kept(bases, anchors, max(bases), keep, pinned)
    assert result <= bases.keys()
    assert all(chain(version, bases, anchors) <= result for version in result)


@given(history=histories(), keep=keep_counts, pinned=pins)
def test_a_joiner_finds_an_anchor_and_every_delta_after_it(
    history: History, keep: int, pinned: list[int]
) -> None:
    bases, anchors = history
    result = kept(bases, anchors, max(bases), keep, pinned)
    newest_anchor = max(anchors)
    assert {version for version in bases if version >= newest_anchor} <= result
    assert set(sorted(bases)[-keep:]) <= result


@given(history=histories(), keep=keep_counts, pinned=pins)
def test_pins_add_at_most_so_many_chains_of_the_latest_interest(
    history: History, keep: int, pinned: list[int]
) -> None:
    bases, anchors = history
    without = kept(bases, anchors, max(bases), keep)

    added = kept(bases, anchors, max(bases), keep, pinned) - without

    counted = [version for version in pinned if version in bases and version not in without][:keep]
    chains = [chain(version, bases, anchors) for version in counted]
    assert set(counted) <= added
    assert added == set().union(*chains) - without


@given(history=histories(), keep=keep_counts)
def test_nothing_is_kept_without_a_reason(history: History, keep: int) -> None:
    bases, anchors = history
    reasons = {*sorted(bases)[-keep:], *(v for v in bases if v >= max(anchors))}
    needed = set().union(*(chain(version, bases, anchors) for version in reasons))
    assert kept(bases, anchors, max(bases), keep) == needed


@given(history=histories(), keep=keep_counts, data=st.data())
def test_what_is_not_announced_yet_stays_and_takes_no_place(
    history: History, keep: int, data: st.DataObject
) -> None:
    bases, anchors = history
    newest = data.draw(st.sampled_from(sorted(bases)))
    result = kept(bases, anchors, newest, keep)
    assert {version for version in bases if version > newest} <= result
    assert set(sorted(version for version in bases if version <= newest)[-keep:]) <= result


def test_whole_versions_only_are_the_newest_few() -> None:
    whole = dict.fromkeys(range(10))
    assert kept(whole, set(whole), 9, 3) == {7, 8, 9}
    assert kept(whole, set(whole), 9, 3, [0, 4, 8, 5, 1]) == {7, 8, 9, 0, 4, 5}


def test_a_chain_that_is_not_held_whole_is_kept_as_far_as_it_is() -> None:
    # as a relay that has just joined: the newest version first, what it is from later or never
    assert kept({7: 6, 6: 5, 3: None}, {3}, 7, 1) == {3, 6, 7}
