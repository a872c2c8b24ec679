"""The graph of relays: every way down begins at the origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from runspec.lint.registry import Context, Violation, rule
from runspec.spec.schema import RunSpec

ORIGIN = "origin"


@rule("relay-upstream", "asynchrony")
def relay_upstream(context: Context) -> Iterator[Violation]:
    """Every upstream of a relay must be the origin or a relay of the spec.

    A relay fetches policy versions from the servers of `upstream`, best first. A name that is no
    server gives it no address to ask, and whoever is below it waits. `origin` is the publisher's
    own server.
    """
    relays = _upstreams(context.spec)
    for name, above in relays.items():
        unknown = [other for other in above if other not in (ORIGIN, *relays)]
        if unknown:
            yield Violation(
                ("broadcast", "relays", name, "upstream"),
                f"no relay {', '.join(unknown)}; known: {', '.join((ORIGIN, *relays))}",
                numbers={"unknown": len(unknown)},
                requires="every upstream is origin or the name of a relay",
                suggestion="name a relay of broadcast.relays, or origin",
            )


@rule("relay-cycle", "asynchrony")
def relay_cycle(context: Context) -> Iterator[Violation]:
    """No relay may fetch from itself, not even by way of others.

        a -> b -> ... -> a  for no relay a

    A relay asks its upstreams for what it lacks, best first. On a cycle each is offered only what
    it has itself, for as long as it does not turn to another upstream: versions come late, or
    where there is no other upstream never.
    """
    relays = _upstreams(context.spec)
    told: set[str] = set()
    for name in relays:
        cycle = _cycle(relays, name)
        if cycle and name not in told:
            told |= set(cycle)
            yield Violation(
                ("broadcast", "relays", name, "upstream"),
                f"{' fetches from '.join(cycle)}",
                numbers={"relays_in_cycle": len(cycle) - 1},
                requires="no relay is above itself",
                suggestion="let one of them fetch from origin alone",
            )


@rule("relay-path", "asynchrony")
def relay_path(context: Context) -> Iterator[Violation]:
    """Every relay must have a path to the origin.

        relay -> upstream -> ... -> origin

    New versions enter the graph at the origin alone. A relay without a path to it never has any,
    and its workers wait until their patience ends. Relays on a cycle and unknown upstreams have
    rules of their own, `relay-cycle` and `relay-upstream`.
    """
    relays = _upstreams(context.spec)
    reached = _below_origin(relays)
    for name, above in relays.items():
        told_elsewhere = _cycle(relays, name) or any(u not in (ORIGIN, *relays) for u in above)
        if name not in reached and not told_elsewhere:
            yield Violation(
                ("broadcast", "relays", name, "upstream"),
                f"fetches from {', '.join(above) or 'nobody'}: no path leads to the origin",
                numbers={"relays_below_origin": len(reached)},
                requires="some upstream is origin, or has a path to it",
                suggestion="add origin",
            )


@rule("pool-relays", "asynchrony")
def pool_relays(context: Context) -> Iterator[Violation]:
    """The relays that a pool fetches from must be relays of the spec, each named once.

    Workers go down the list, best first, and to the origin at last. A name that is no relay gives
    no address; a second mention says nothing that the first did not.
    """
    known = _upstreams(context.spec)
    for pool in context.spec.samplers:
        wanted = pool.relays or []
        unknown = [name for name in dict.fromkeys(wanted) if name not in known]
        twice = [name for name in dict.fromkeys(wanted) if wanted.count(name) > 1]
        where = ("samplers", pool.name, "relays")
        if unknown:
            origin = "; origin comes last by itself" if ORIGIN in unknown else ""
            yield Violation(
                where,
                f"no relay {', '.join(unknown)}; known: {', '.join(known) or 'none'}{origin}",
                numbers={"unknown": len(unknown)},
                requires="every name is in broadcast.relays",
                suggestion="name relays of broadcast.relays",
            )
        if twice:
            yield Violation(
                where,
                f"names {', '.join(twice)} more than once",
                numbers={"named_again": len(wanted) - len(set(wanted))},
                requires="every relay is named once",
                suggestion="name each once",
            )


def graph_is_sound(spec: RunSpec) -> bool:
    """Whether every relay can be reached from the origin, and all names are known."""
    relays = _upstreams(spec)
    known = {ORIGIN, *relays}
    named = {name for above in relays.values() for name in above}
    named |= {name for pool in spec.samplers for name in pool.relays or []}
    cyclic = any(_cycle(relays, name) for name in relays)
    return named <= known and not cyclic and _below_origin(relays) == set(relays)


def _upstreams(spec: RunSpec) -> dict[str, list[str]]:
    return {relay.name: relay.upstream for relay in spec.broadcast.relays}


def _below_origin(relays: Mapping[str, list[str]]) -> set[str]:
    reached = {ORIGIN}
    while more := {n for n, above in relays.items() if n not in reached and reached & set(above)}:
        reached |= more
    return reached - {ORIGIN}


def _cycle(relays: Mapping[str, list[str]], start: str) -> list[str]:
    """The shortest way up from a relay back to it, both ends included; empty if there is none."""
    paths = [[start]]
    seen: set[str] = set()
    for path in paths:  # grows while it is walked: breadth first
        for above in relays.get(path[-1], []):
            if above == start:
                return [*path, start]
            if above not in seen:
                seen.add(above)
                paths.append([*path, above])
    return []
