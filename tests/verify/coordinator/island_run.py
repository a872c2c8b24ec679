"""Runs with learner islands: their specs, their offers, and their clients."""

from __future__ import annotations

from typing import Any

from runspec.core.schema import RunSpec
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site, tiny_spec
from tests.verify.coordinator.documents import documents_spec
from tests.verify.coordinator.filled import digest
from verify.formats.batch import ShareOffered
from verify.island_client import IslandClient

NAMES = ("a", "b", "c")


def with_islands(spec: RunSpec, **settings: Any) -> RunSpec:
    """A spec whose learner is three islands."""
    fields = spec.model_dump(mode="json")
    fields["learner"]["islands"] = {"members": [{"name": name} for name in NAMES], **settings}
    return RunSpec.model_validate(fields)


def islands_spec(*, steps: int = 9, **settings: Any) -> RunSpec:
    """A run on documents, six rows a step, every version published."""
    return with_islands(documents_spec(steps=steps, publish_every=1), **settings)


def sampled_spec(**settings: Any) -> RunSpec:
    """A run with workers."""
    return with_islands(tiny_spec(), **settings)


def offer(island: str, step: int = 0, **changes: Any) -> ShareOffered:
    """What an honest island offers."""
    fields = {
        "run": RUN,
        "step": step,
        "island": island,
        "base": digest("outer", step),
        "data": digest("corpus"),
        "url": f"http://{island}.example:8000",
        "manifest": digest("manifest", island, step),
        "share": digest("share", island, step),
        "bytes": 400,
        "weight": 128.0,
        "norm": 2.0,
    }
    return ShareOffered(**{**fields, **changes})


def outer(step: int) -> str:
    """Digest of the outer state that follows from a step."""
    return digest("outer", step + 1)


def island(site: Site, name: str, *, deadline_s: float = DEADLINE_S) -> IslandClient:
    root = site.root.public_hex
    key = site.islands[name]
    return IslandClient(site.url, RUN, key, root_public_key=root, deadline_s=deadline_s)
