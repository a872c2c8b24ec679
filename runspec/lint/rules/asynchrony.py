"""Lag, versions, and the graph of relays."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.lint.registry import Context, Violation, rule


@rule("versions-kept", "asynchrony")
def versions_kept(context: Context) -> Iterator[Violation]:
    """Versions are kept as long as rollouts of them may be checked."""
    spec = context.spec
    needed = spec.algorithm.async_level + 2
    if spec.broadcast.keep_versions < needed:
        yield Violation(
            ("broadcast", "keep_versions"),
            f"{spec.broadcast.keep_versions} is less than async_level + 2 = {needed}: a version "
            "would be removed while rollouts of it are sampled and checked",
        )


@rule("relay-tree", "asynchrony")
def relay_tree(context: Context) -> Iterator[Violation]:
    """Relays form a graph without cycles that begins at the origin."""
    spec = context.spec
    upstream = {relay.name: relay.upstream for relay in spec.broadcast.relays}
    for name, above in upstream.items():
        where = ("broadcast", "relays", name)
        if name == "origin":
            yield Violation(where, "origin is the publisher's own server, not a relay")
        for other in above:
            if other != "origin" and other not in upstream:
                known = ", ".join(["origin", *upstream])
                yield Violation((*where, "upstream"), f"no relay {other!r}; known: {known}")
    # A cycle is what is left when relays whose upstreams are all settled are taken away.
    settled = {"origin", *(o for above in upstream.values() for o in above if o not in upstream)}
    while more := {
        n for n, above in upstream.items() if n not in settled and settled >= set(above)
    }:
        settled |= more
    for name in sorted(set(upstream) - settled):
        yield Violation(("broadcast", "relays", name, "upstream"), "is part of, or below, a cycle")
