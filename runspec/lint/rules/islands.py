"""Rules on islands: programs that train one model, each with its own machine."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.core.spec.islands import members
from runspec.lint.registry import Context, Violation, rule

_ISLANDS = ("learner", "islands")


@rule("island-trunk", "algorithm")
def island_trunk(context: Context) -> Iterator[Violation]:
    """The first island must not name a machine: it has the learner's.

        learner.islands.members[0]: no hardware, mesh, hosts or rows

    The first island is the process `learner`, which has the run directory and publishes the
    versions. `learner.hardware`, `mesh`, `hosts` and `packing.rows` are its own; the other islands
    have the same where they do not name theirs.
    """
    for member in members(context.spec)[:1]:
        own = {
            "hardware": member.hardware,
            "mesh": member.mesh,
            "hosts": member.hosts,
            "rows": member.rows,
        }
        for key, value in own.items():
            if value is not None:
                there = "packing.rows" if key == "rows" else key
                yield Violation(
                    (*_ISLANDS, "members", member.name, key),
                    f"{member.name} is the first island, whose {key} is learner.{there}",
                    suggestion=f"set learner.{there}",
                )
