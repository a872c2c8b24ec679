"""The planner against brute force: every way to a version, and the cheapest of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broadcast.chain import MAX_LINKS, Chain, Link, Unknown, cheapest
from runspec.common.errors import UserError

Links = dict[int, Link | None]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Links, set[int]]:
    """Versions 0 to n-1: each an anchor, a delta, both, or pruned; and those that are held."""
    links: Links = {}
    for version in range(draw(st.integers(1, 12))):
        base = draw(st.none() | st.integers(0, version - 1)) if version else None
        anchor = base is None or draw(st.booleans())
        link = Link(
            base=base,
            delta=0 if base is None else draw(st.integers(0, 30)),
            whole=draw(st.integers(0, 60)) if anchor else None,
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
    """The planner as the client runs it: manifests are looked up as it asks; and which those are"""
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

    way, asked = plan(target, links, held)

    # Whatever lies behind the deltas of this much is no cheaper, even if it cost nothing more.
    behind = 0
    for version in asked:
        assert behind <= way.size or version == target
        link = links[version]
        behind += link.delta if link is not None else 0
    assert not held & set(asked)


def test_what_is_missing_is_named() -> None:
    links: Mapping[int, Link | None] = {5: Link(4, 10, None), 4: Link(3, 10, None), 3: None}

    with pytest.raises(UserError, match="version 5 .* needs version 3, which no server has"):
        cheapest(5, links, held=())


def test_a_pruned_history_does_not_hide_an_anchor() -> None:
    links = {5: Link(4, 10, None), 4: Link(3, 10, 1000), 3: None}

    assert cheapest(5, links, held=()) == Chain(4, False, (5,), 1010)


def test_a_held_version_ends_the_walk() -> None:
    assert cheapest(5, {5: Link(4, 10, 10_000)}, held={4}) == Chain(4, True, (5,), 10)
    # and an anchor smaller than its own delta is not passed over for it
    assert cheapest(5, {5: Link(4, 10, 9)}, held={4}) == Chain(5, False, (), 9)


def test_an_endless_chain_is_given_up() -> None:
    links = {version: Link(version - 1, 1, None) for version in range(1, 2 * MAX_LINKS)}

    with pytest.raises(UserError, match=f"no anchor within {MAX_LINKS} deltas"):
        cheapest(2 * MAX_LINKS - 1, links, held=())
