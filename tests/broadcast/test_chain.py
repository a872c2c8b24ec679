"""The planner against brute force: every way to a version, and the cheapest of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broadcast.chain import MAX_LINKS, Chain, Link, Unknown, cheapest
from runspec.core.errors import UserError
from runspec.core.spec.schema.samplers import Broadcast

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


def test_what_is_missing_is_named() -> None:
    links: Mapping[int, Link | None] = {5: Link(4, 10, None), 4: Link(3, 10, None), 3: None}

    with pytest.raises(UserError, match=r"version 5 .* needs version 3, which no server has"):
        cheapest(5, links, held=())


def test_a_pruned_history_does_not_hide_an_anchor() -> None:
    links = {5: Link(4, 10, None), 4: Link(3, 10, 1000), 3: None}

    assert cheapest(5, links, held=()) == Chain(4, False, (5,), 1010)


def test_a_held_version_ends_the_walk() -> None:
    assert cheapest(5, {5: Link(4, 10, 10_000)}, held={4}) == Chain(4, True, (5,), 10)
    # and an anchor no larger than its own delta is not passed over for it
    assert cheapest(5, {5: Link(4, 10, 10)}, held={4}) == Chain(5, False, (), 10)


def test_a_joiner_asks_no_further_than_to_the_newest_anchor() -> None:
    links = {5: Link(4, 10, None), 4: Link(3, 10, 1000)}

    assert cheapest(5, links, held=()) == Chain(4, False, (5,), 1010)
    assert cheapest(5, links, held={2}) == Unknown(3)  # where there is something, it may be less


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
