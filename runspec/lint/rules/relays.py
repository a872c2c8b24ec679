"""Rules on the graph of relays, whose paths all start at the origin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from runspec.core.spec.schema import RunSpec
from runspec.lint.registry import Context, Violation, rule

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
    for cycle in _cycles(_upstreams(context.spec)):
        yield Violation(
            ("broadcast", "relays", cycle[0], "upstream"),
            f"fetches from itself: {' from '.join(cycle)}",
            numbers={"relays_in_cycle": len(cycle) - 1},
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
    told = {name for cycle in _cycles(relays) for name in cycle}
    told |= {name for name, above in relays.items() if not {ORIGIN, *relays} >= set(above)}
    for name, above in relays.items():
        if name not in reached and name not in told:
            yield Violation(
                ("broadcast", "relays", name, "upstream"),
                f"fetches from {', '.join(above) or 'nobody'}: no path leads to the origin",
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
                suggestion="name relays of broadcast.relays",
            )
        if twice:
            yield Violation(
                where,
                f"names {', '.join(twice)} more than once",
                suggestion="name each once",
            )


def graph_is_sound(spec: RunSpec) -> bool:
    """Whether every relay can be reached from the origin, and all names are known."""
    relays = _upstreams(spec)
    named = {name for above in relays.values() for name in above}
    named |= {name for pool in spec.samplers for name in pool.relays or []}
    known = named <= {ORIGIN, *relays}
    return known and not _cycles(relays) and _below_origin(relays) == set(relays)


def _upstreams(spec: RunSpec) -> dict[str, list[str]]:
    relays = spec.broadcast.relays  # `reserved-names` tells of one that is called origin
    return {relay.name: relay.upstream for relay in relays if relay.name != ORIGIN}


def _below_origin(relays: Mapping[str, list[str]]) -> set[str]:
    below: dict[str, list[str]] = defaultdict(list)
    for name, above in relays.items():
        for upstream in above:
            below[upstream].append(name)
    reached, waiting = set(), [ORIGIN]
    while waiting:
        for name in below.pop(waiting.pop(), []):
            reached.add(name)
            waiting.append(name)
    return reached


def _cycles(relays: Mapping[str, list[str]]) -> list[list[str]]:
    """Cycles without a relay in common, each from a relay up to itself; none is left besides."""
    left = {name: [u for u in above if u in relays] for name, above in relays.items()}
    cycles = []
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            cycles.append(error.args[1][::-1])
            for name in set(cycles[-1]):
                del left[name]
        else:
            return cycles
