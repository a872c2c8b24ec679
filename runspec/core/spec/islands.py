"""Islands of a spec, and the spec by which one island trains."""

from __future__ import annotations

from math import ceil

from runspec.core.spec.schema import Grpo, IslandMember, RunSpec, Supervised


def members(spec: RunSpec) -> list[IslandMember]:
    """Return the islands in the order of the spec; empty if the learner is one program."""
    return [] if spec.learner.islands is None else spec.learner.islands.members


def island_names(spec: RunSpec) -> list[str]:
    """Return the islands' names in the order of the spec; the first is the trunk's.

    Empty if the learner is one program.
    """
    return [member.name for member in members(spec)]


def island_spec(spec: RunSpec, name: str) -> RunSpec:
    """Return the spec by which one island trains, as if it were the only learner.

    It has the island's hardware, mesh, hosts and rows, its part of `tokens_per_update` or of
    `prompts_per_step` (rounded up), and no islands. A spec without islands is returned as it is.

    Args:
        spec: a resolved spec.
        name: name of the island.

    Raises:
        KeyError: the spec has islands, and none of this name.
    """
    found = {member.name: member for member in members(spec)}
    if not found:
        return spec
    member, learner = found[name], spec.learner
    packing = learner.packing
    if member.rows is not None:
        packing = packing.model_copy(update={"rows": member.rows})
    own = learner.model_copy(
        update={
            "hardware": member.hardware or learner.hardware,
            "mesh": member.mesh or learner.mesh,
            "hosts": member.hosts or learner.hosts,
            "packing": packing,
            "islands": None,
        }
    )
    return spec.model_copy(update={"learner": own, "algorithm": _part(spec, len(found))})


def _part(spec: RunSpec, count: int) -> Grpo | Supervised:
    """Return the algorithm with the part of a step's data that one of `count` islands has."""
    if spec.supervised is None:
        groups = ceil(spec.grpo.prompts_per_step / count)
        return spec.grpo.model_copy(update={"prompts_per_step": groups})
    tokens = spec.supervised.tokens_per_update // count
    return spec.supervised.model_copy(update={"tokens_per_update": tokens})
