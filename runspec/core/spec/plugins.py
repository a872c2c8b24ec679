"""Which plug-ins a spec asks for, by entry-point metadata alone: nothing of them is imported."""

from __future__ import annotations

from importlib.metadata import entry_points

from runspec.core.spec.schema import RunSpec

SOURCE_GROUP = "runspec.sources"
REWARD_GROUP = "runspec.rewards"
PREFILL_GROUP = "runspec.prefill"


def installed_kinds(group: str) -> list[str]:
    """Names that the installed packages offer in an entry-point group."""
    return sorted({point.name for point in entry_points(group=group)})


def missing_plugins(spec: RunSpec) -> dict[str, str]:
    """What no installed package offers, by the path of the source or reward that asks for it."""
    asked = [
        *((SOURCE_GROUP, f"data.sources.{s.name}", s.kind) for s in spec.data.sources),
        *((REWARD_GROUP, f"reward.{r.name}", r.kind) for r in spec.reward),
    ]
    return {
        path: f"no plug-in of {group} offers kind {kind!r}; "
        f"installed: {', '.join(installed_kinds(group)) or 'none'}"
        for group, path, kind in asked
        if kind not in installed_kinds(group)
    }
