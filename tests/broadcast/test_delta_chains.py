"""Chains of deltas: the cheapest way to a version, and which versions are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broadcast.assemble import MAX_LINKS, Chain, cheapest
from broadcast.manifest import ObjectInfo, WeightsManifest
from broadcast.relay_store import versions_to_keep
from runspec.core.errors import UserError
from runspec.core.spec.schema.samplers import Broadcast

Needs = dict[int, int | None]
Links = dict[int, WeightsManifest | None]
STEADY = settings(derandomize=True, deadline=None, max_examples=150)


@st.composite
def needs(draw: st.DrawFn) -> Needs:
    """1 to 40 versions as publishers make them and what each is rebuilt from: the first is an
    anchor, every other an anchor or a delta from some version before it."""
    found: Needs = {}
    for version in sorted(draw(st.sets(st.integers(0, 100), min_size=1, max_size=40))):
        before = sorted(found)[-3:]
        found[version] = draw(st.none() | st.sampled_from(before)) if before else None
    return found


def with_chains(versions: Collection[int], needs: Needs) -> set[int]:
    """Versions, and all that they are rebuilt from."""
    found = set(versions)
    for version in versions:
        if (base := needs[version]) is not None:
            found |= with_chains({base}, needs)
    return found


@STEADY
@given(needs(), st.integers(1, 6), st.lists(st.integers(0, 100), unique=True), st.data())
def test_what_is_kept_is_what_readers_and_joiners_need(needs, keep, pinned, data):
    # given versions of which some are not announced yet
    newest = data.draw(st.sampled_from(sorted(needs)))
    announced = sorted(version for version in needs if version <= newest)
    anchors = [version for version in announced if needs[version] is None]
    # then the newest stay, all since the last anchor, those to come, and what these need
    reasons = {*announced[-keep:], *(v for v in needs if v >= max(anchors))}
    without = versions_to_keep(needs, newest, keep)
    assert without == with_chains(reasons, needs)
    # and of those that are read as many chains more, the last read first
    read = [version for version in pinned if version in needs and version not in without][:keep]
    assert versions_to_keep(needs, newest, keep, pinned) == without | with_chains(read, needs)


def test_a_chain_that_is_not_held_whole_is_kept_as_far_as_it_is() -> None:
    # as a relay that has just joined: the newest version first, what it is from later or never
    assert versions_to_keep({7: 6, 6: 5, 3: None}, 7, 1) == {3, 6, 7}


def version_of(base: int | None, delta: int, whole: int | None) -> WeightsManifest:
    """A manifest of a version with a delta of so many bytes, and so many whole."""
    sizes = [("w", whole)], [("w.delta", None if base is None else delta)]
    objects, parts = (
        {name: ObjectInfo(size, "", ()) for name, size in each if size is not None}
        for each in sizes
    )
    return WeightsManifest("demo", 0, base, None, {}, ("w",), objects, parts)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Links, set[int]]:
    """Versions 0 to n-1: each an anchor, a delta, both, or pruned; and those that are held."""
    links: Links = {}
    whole = draw(st.integers(0, 60))
    for version in range(draw(st.integers(1, 12))):
        base = draw(st.none() | st.integers(0, version - 1)) if version else None
        size = 0 if base is None else draw(st.integers(0, 30))
        link = version_of(base, size, whole if base is None or draw(st.booleans()) else None)
        links[version] = draw(st.sampled_from([link, link, link, None]))
    return links, draw(st.sets(st.sampled_from(sorted(links))))


def every_way(target: int, links: Links, held: Collection[int]) -> Iterator[Chain]:
    """By recursion, from the oldest version on: unlike the planner, which walks back once."""
    if target in held:
        yield Chain(target, True, (), 0)
    if (link := links[target]) is None:
        return
    if link.is_anchor:
        yield Chain(target, False, (), link.weights_bytes)
    if link.base is not None:
        for way in every_way(link.base, links, held):
            yield Chain(way.start, way.held, (*way.deltas, target), way.size + link.delta_bytes)


@STEADY
@given(histories())
def test_the_way_is_the_one_with_the_fewest_bytes_and_questions(history):
    links, held = history
    target, known, asked = max(links), Links(), list[int]()

    def plan() -> Chain:
        while isinstance(step := cheapest(target, known, held), int):
            asked.append(step)
            known[step] = links[step]
        return step

    ways = list(every_way(target, links, held))
    if not ways:
        with pytest.raises(UserError, match=f"version {target} cannot be made: it needs version"):
            plan()
        return
    way = plan()
    assert way in ways  # every link is there, and the last one is the target
    assert (way.size, len(way.deltas)) == min((w.size, len(w.deltas)) for w in ways)
    # A manifest is worth a question while it may be that of the newest anchor, or on the way to
    # something held that costs less than that anchor.
    behind, anchor = 0, None
    for version in asked:
        assert anchor is None or (behind < anchor and version > min(held))
        if (link := links[version]) is not None:
            if anchor is None and link.is_anchor:
                anchor = behind + link.weights_bytes
            behind += link.delta_bytes
    assert not held & set(asked) and len(asked) == len(set(asked))


def test_an_endless_chain_is_given_up_and_no_run_makes_one() -> None:
    links: Links = {
        version: version_of(version - 1, 1, None) for version in range(1, 2 * MAX_LINKS)
    }
    links[2 * MAX_LINKS - 1 - MAX_LINKS] = version_of(None, 0, 9)
    assert isinstance(way := cheapest(2 * MAX_LINKS - 1, links, held=()), Chain)
    assert (way.start, len(way.deltas)) == (MAX_LINKS - 1, MAX_LINKS)
    links[MAX_LINKS - 1] = version_of(MAX_LINKS - 2, 1, None)
    with pytest.raises(UserError, match=f"no anchor within {MAX_LINKS} deltas"):
        cheapest(2 * MAX_LINKS - 1, links, held=())
    # Anchors are the multiples of `anchor_every`; where it is changed in a run, the way to the next
    # may be as long as both together.
    assert Broadcast(anchor_every=MAX_LINKS // 2).anchor_every == MAX_LINKS // 2
    with pytest.raises(ValueError, match="less than or equal"):
        Broadcast(anchor_every=MAX_LINKS // 2 + 1)
