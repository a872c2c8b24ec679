"""A run that trains on documents, for tests of its coordinator."""

from __future__ import annotations

from runspec.core.schema import RunSpec
from tests.verify.coordinator.deployment import RUN, tiny_spec

ROWS = 6
"""Rows of a step: two updates of 192 positions, in rows of 64."""


def documents_spec(*, steps: int = 9, publish_every: int = 2) -> RunSpec:
    """`tiny_spec` without workers."""
    spec = tiny_spec(steps=steps).model_dump(mode="json")
    for field in ("samplers", "reward", "verify", "warm_start"):
        del spec[field]
    spec["data"] = {"sources": [{"name": "s", "kind": "text", "uri": "reads.txt"}]}
    spec["algorithm"] = {
        "kind": "pretrain",
        "updates_per_step": 2,
        "tokens_per_update": 192,
        "publish_every": publish_every,
    }
    assert spec["name"] == RUN
    return RunSpec.model_validate(spec)
