"""Retention over drawn histories of anchors and deltas."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broadcast.delta_chains import MAX_LINKS, Chain, Link, Unknown, cheapest, versions_to_keep
from runspec.core.errors import UserError
from runspec.core.spec.schema.samplers import Broadcast

History = dict[int, int | None]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """1 to 40 versions as publishers make them and what each is rebuilt from: the first is an
    anchor, every other an anchor or a delta from some version before it."""
    needs: History = {}
    for version in sorted(draw(st.sets(st.integers(0, 100), min_size=1, max_size=40))):
        before = sorted(needs)[-3:]
        needs[version] = draw(st.none() | st.sampled_from(before)) if before else None
    return needs


def chain(version: int, needs: History) -> set[int]:
    """All that a version is rebuilt from, itself included."""
    base = needs[version]
    return {version} if base is None else {version} | chain(base, needs)


def newest_anchor(needs: History) -> int:
    return max(version for version, base in needs.items() if base is None)


keep_counts = st.integers(1, 6)
pins = st.lists(st.integers(0, 100), unique=True, max_size=20)


@given(needs=histories(), keep=keep_counts, pinned=pins)
def test_every_kept_version_is_rebuilt_from_kept_ones(
    needs: History, keep: int, pinned: list[int]
) -> None:
    result = versions_to_keep(needs, max(needs), keep, pinned)
    assert result <= needs.keys()
    assert all(chain(version, needs) <= result for version in result)


@given(needs=histories(), keep=keep_counts, pinned=pins)
def test_a_joiner_finds_an_anchor_and_every_delta_after_it(
    needs: History, keep: int, pinned: list[int]
) -> None:
    result = versions_to_keep(needs, max(needs), keep, pinned)
    assert {version for version in needs if version >= newest_anchor(needs)} <= result
    assert set(sorted(needs)[-keep:]) <= result


@given(needs=histories(), keep=keep_counts, pinned=pins)
def test_pins_add_at_most_so_many_chains_of_the_latest_interest(
    needs: History, keep: int, pinned: list[int]
) -> None:
    without = versions_to_keep(needs, max(needs), keep)

    added = versions_to_keep(needs, max(needs), keep, pinned) - without

    counted = [version for version in pinned if version in needs and version not in without][:keep]
    chains = [chain(version, needs) for version in counted]
    assert set(counted) <= added
    assert added == set().union(*chains) - without


@given(needs=histories(), keep=keep_counts)
def test_nothing_is_kept_without_a_reason(needs: History, keep: int) -> None:
    reasons = {*sorted(needs)[-keep:], *(v for v in needs if v >= newest_anchor(needs))}
    needed = set().union(*(chain(version, needs) for version in reasons))
    assert versions_to_keep(needs, max(needs), keep) == needed


@given(needs=histories(), keep=keep_counts, data=st.data())
def test_what_is_not_announced_yet_stays_and_takes_no_place(
    needs: History, keep: int, data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(sorted(needs)))
    result = versions_to_keep(needs, newest, keep)
    assert {version for version in needs if version > newest} <= result
    assert set(sorted(version for version in needs if version <= newest)[-keep:]) <= result


def test_a_chain_that_is_not_held_whole_is_kept_as_far_as_it_is() -> None:
    # as a relay that has just joined: the newest version first, what it is from later or never
    assert versions_to_keep({7: 6, 6: 5, 3: None}, 7, 1) == {3, 6, 7}


# -- The planner against brute force: every way to a version, and the cheapest of them -------------


Links = dict[int, Link | None]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Links, set[int]]:
    """Versions 0 to n-1: each an anchor, a delta, both, or pruned; and those that are held."""
    links: Links = {}
    whole = draw(st.integers(0, 60))
    for version in range(draw(st.integers(1, 12))):
        base = draw(st.none() | st.integers(0, version - 1)) if version else None
        anchor = base is None or draw(st.booleans())
        link = Link(
            base=base,
            delta=0 if base is None else draw(st.integers(0, 30)),
            whole=whole if anchor else None,
        )
        links[version] = draw(st.sampled_from([link, link, link, None]))
    return links, draw(st.sets(st.sampled_from(sorted(links))))


def every_way(target: int, links: Links, held: Collection[int]) -> Iterator[Chain]:
    """By recursion, from the oldest version on: unlike the planner, which walks back once."""
    if target in held:
        yield Chain(target, True, (), 0)
    link = links[target]
    if link is None:
        return
    if link.whole is not None:
        yield Chain(target, False, (), link.whole)
    if link.base is not None:
        for way in every_way(link.base, links, held):
            yield Chain(way.start, way.held, (*way.deltas, target), way.size + link.delta)


def plan(target: int, links: Links, held: Collection[int]) -> tuple[Chain, list[int]]:
    """The planner as the client runs it, and the versions whose manifests it asked for."""
    known: dict[int, Link | None] = {}
    asked: list[int] = []
    while isinstance(step := cheapest(target, known, held), Unknown):
        asked.append(step.version)
        known[step.version] = links[step.version]
    return step, asked


@given(histories())
def test_the_way_is_the_one_with_the_fewest_bytes(history: tuple[Links, set[int]]) -> None:
    links, held = history
    target = max(links)
    ways = list(every_way(target, links, held))

    if not ways:
        with pytest.raises(UserError, match=f"version {target} cannot be made"):
            plan(target, links, held)
        return
    way, asked = plan(target, links, held)

    assert way in ways  # every link is there, and the last one is the target
    assert (way.size, len(way.deltas)) == min((w.size, len(w.deltas)) for w in ways)
    assert len(asked) == len(set(asked))


@given(histories())
def test_no_manifest_is_asked_for_that_cannot_make_the_way_cheaper(
    history: tuple[Links, set[int]],
) -> None:
    links, held = history
    target = max(links)
    if not any(True for _ in every_way(target, links, held)):
        return

    _, asked = plan(target, links, held)

    # A manifest is worth a question while it may be that of the newest anchor, or on the way to
    # something held that costs less than that anchor.
    behind, anchor = 0, None
    for version in asked:
        assert anchor is None or (behind < anchor and version > min(held))
        link = links[version]
        if link is not None:
            if anchor is None and link.whole is not None:
                anchor = behind + link.whole
            behind += link.delta
    assert not held & set(asked)


def test_an_endless_chain_is_given_up() -> None:
    links = {version: Link(version - 1, 1, None) for version in range(1, 2 * MAX_LINKS)}

    with pytest.raises(UserError, match=f"no anchor within {MAX_LINKS} deltas"):
        cheapest(2 * MAX_LINKS - 1, links, held=())


def test_no_run_makes_chains_that_are_given_up() -> None:
    """Anchors are the multiples of `anchor_every`; where it is changed in a run, the way to the
    next may be as long as both together."""
    most = MAX_LINKS // 2
    assert Broadcast(anchor_every=most).anchor_every == most
    with pytest.raises(ValueError, match="less than or equal"):
        Broadcast(anchor_every=most + 1)
