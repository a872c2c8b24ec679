"""Where an island keeps full states and the cache of its documents."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest

from learner_jax.distributed import Peers
from learner_jax.island_link import IslandLink
from learner_jax.learner_run import LearnerRun
from runspec.core.run_files import corpus_cache, island_folder
from tests.runspec.supervised import supervised_spec

RUN = Path("/runs/reads")


def as_seen_by(island: str, **checkpoints: str) -> LearnerRun:
    islands = {"members": [{"name": "a"}, {"name": "b"}]}
    spec = supervised_spec(learner={"islands": islands}, checkpoints=checkpoints)
    folder = RUN if island == "a" else island_folder(RUN, f"island-{island}")
    unused = cast(Any, None)
    log, link = logging.getLogger("test"), IslandLink(island)
    return LearnerRun(folder, spec, unused, unused, {}, Peers(), log, link)


@pytest.mark.parametrize("where", ["/disk", "s3://bucket/folder"])
def test_islands_share_no_folder_of_checkpoints(where: str) -> None:
    first, second = as_seen_by("a", dir=where), as_seen_by("b", dir=where)
    assert str(first.states) == f"{where}/reads/state"
    assert str(second.states) == f"{where}/reads/islands/b/state"
    assert str(second.params) == f"{where}/reads/islands/b/params"
    # and without such a folder each has its own
    assert as_seen_by("a").states == RUN / "checkpoints" / "state"
    assert as_seen_by("b").states == RUN / "work" / "island-b" / "checkpoints" / "state"


def test_islands_of_one_machine_share_the_cache_of_documents() -> None:
    assert as_seen_by("b").corpus_cache == as_seen_by("a").corpus_cache == corpus_cache(RUN)
