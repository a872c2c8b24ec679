"""Plug-ins that a spec needs, by entry-point metadata: no plug-in is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runspec.core.entry_points import entry_points_of
from runspec.core.spec.schema import RunSpec

SOURCE_GROUP = "runspec.sources"
REWARD_GROUP = "runspec.rewards"
PREFILL_GROUP = "runspec.prefill"
MONITOR_GROUP = "runspec.monitors"


def installed_kinds(group: str) -> list[str]:
    """Return the names that installed packages offer in an entry-point group."""
    return sorted({point.name for point in entry_points_of(group)})


@dataclass(frozen=True)
class MissingPlugin:
    """Kind of source, reward or monitor that no installed package offers."""

    location: tuple[str, ...]
    """Keys and name of the source, reward or monitor that needs it."""
    group: str
    """Entry-point group."""
    kind: str
    installed: Sequence[str]

    @property
    def path(self) -> str:
        return ".".join(self.location)

    @property
    def remedy(self) -> str:
        return f"install the package that offers it; installed: {', '.join(self.installed)}"

    def __str__(self) -> str:
        return f"no installed package offers the kind {self.kind!r} in {self.group}"


def missing_plugins(spec: RunSpec) -> list[MissingPlugin]:
    """Return sources of problems, rewards and monitors whose kind no installed package offers."""
    problems = spec.data.sources if spec.supervised is None else ()  # documents have no plug-ins
    asked: list[tuple[str, tuple[str, ...], str]] = [
        *((SOURCE_GROUP, ("data", "sources", s.name), s.kind) for s in problems),
        *((REWARD_GROUP, ("reward", r.name), r.kind) for r in spec.reward),
        *((MONITOR_GROUP, ("monitors", m.name), m.kind) for m in spec.monitors),
    ]
    offered = {group: installed_kinds(group) for group in dict.fromkeys(each[0] for each in asked)}
    return [
        MissingPlugin(location, group, kind, offered[group])
        for group, location, kind in asked
        if kind not in offered[group]
    ]
