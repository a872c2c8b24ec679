"""Islands of one run: they hold the same outer parameters, whoever is killed, late or away."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from bridge.conversion import LeafReader
from bridge.tensors import FlatLayout
from learner_jax.distributed import IslandLink, LearnerRun, Peers
from runspec.core.models import read_config
from runspec.core.models.family import parse_config
from runspec.core.run_files import corpus_cache, island_folder
from runspec.local.identity import make_identity
from runspec.local.prepare import roll_back
from tests.learner_jax.islands.island_runs import DEADLINE_S, IslandRun, spec_of
from tests.learner_jax.test_document_runs import files
from tests.runspec.supervised import supervised_spec

__all__ = ["files"]
STEPS = 4


def ended(run: IslandRun) -> dict[str, dict[str, np.ndarray]]:
    return {name: run.arrays(name) for name in run.names}


def assert_same_end(a: dict[str, Any], b: dict[str, Any]) -> None:
    for island, arrays in a.items():
        assert arrays.keys() == b[island].keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, b[island][name], err_msg=f"{island} {name}")


@pytest.fixture(scope="module")
def straight(files: Path, tmp_path_factory: pytest.TempPathFactory) -> IslandRun:
    """A run that nothing disturbed; tests/e2e/test_documents.py has one that overlaps."""
    spec = spec_of(files, steps=STEPS, updates=2, every=2, codec={"kind": "sparse"})
    run = IslandRun(tmp_path_factory.mktemp("straight") / "runs" / "run", spec, files / "tokenizer")
    with run:
        run.train()
    return run


@pytest.mark.nightly
def test_islands_end_with_the_same_outer_parameters_which_are_the_version(straight):
    a, b = (straight.arrays(name) for name in straight.names)
    # then both hold the same bits, which moved, and different rows and residuals
    for name in ("theta", "momentum"):
        np.testing.assert_array_equal(a[name], b[name])
    assert a["version"] == [STEPS] and "sent_params" not in a
    assert np.abs(a["residual"] - b["residual"]).max() > 0
    assert np.abs(a["momentum"]).max() > 0
    # and the newest version is the outer parameters
    folder = straight.path / "weights" / f"v{STEPS}"
    config = parse_config(read_config(folder), place=str(folder))
    reader = LeafReader(folder, config)
    leaves = {path: reader.read(path) for path in reader.entries}
    np.testing.assert_array_equal(FlatLayout(config).flatten(leaves), a["theta"])
    assert straight.lines("a")[-1]["loss"] < straight.lines("a")[0]["loss"]


@pytest.mark.nightly
def test_a_run_that_is_killed_ends_with_the_same_bits(straight, files, tmp_path):
    # given a run of which one island is told to end, the other is killed, and the servers end
    run = IslandRun(tmp_path / "runs" / "run", straight.spec, files / "tokenizer")
    with run:
        a, b = (run.start(name) for name in run.names)
        run.trained("b", 3)
        b.kill()
        a.terminate()
        assert a.wait(DEADLINE_S) == 0, run.log("a").read_text()[-3000:]
    # when all start again
    again = IslandRun(run.path, run.spec, files / "tokenizer")
    with again:
        again.train()
    # then parameters, momentum and residuals are those of the undisturbed run
    assert_same_end(ended(straight), ended(again))


@pytest.mark.nightly
def test_after_a_rollback_every_island_goes_on_from_the_version(straight, files, tmp_path):
    # given a run that has ended, taken back to its second version
    path = tmp_path / "runs" / "run"
    shutil.copytree(straight.path, path, symlinks=True)
    kept = path.with_name("kept")
    shutil.copytree(path / "work" / "island-b", kept)
    roll_back(path, 2)
    make_identity(path, straight.spec)
    # and an island that was away meanwhile: its full state is of a version that is gone
    shutil.rmtree(path / "work" / "island-b")
    kept.rename(path / "work" / "island-b")
    # when all start again
    run = IslandRun(path, straight.spec, files / "tokenizer")
    with run:
        run.train()
    # then that one has joined anew, and all hold the same bits
    assert "joins anew: only 2 steps are committed" in run.log("b").read_text()
    a, b = (run.arrays(name) for name in run.names)
    assert a["version"] == b["version"] == [STEPS]
    for name in ("theta", "momentum"):
        np.testing.assert_array_equal(a[name], b[name])
    assert [line["step"] for line in run.lines("a")] == [*range(STEPS)]


RUN = Path("/runs/reads")


def as_seen_by(island: str, **checkpoints: str) -> LearnerRun:
    islands = {"members": [{"name": "a"}, {"name": "b"}]}
    spec = supervised_spec(learner={"islands": islands}, checkpoints=checkpoints)
    folder = RUN if island == "a" else island_folder(RUN, f"island-{island}")
    unused = cast(Any, None)
    log, link = logging.getLogger("test"), IslandLink(island)
    return LearnerRun(folder, spec, unused, unused, {}, Peers(), log, link)


@pytest.mark.parametrize("where", ["/disk", "s3://bucket/folder"])
def test_islands_share_no_folder_of_checkpoints(where):
    first, second = as_seen_by("a", dir=where), as_seen_by("b", dir=where)
    assert str(first.states) == f"{where}/reads/state"
    assert str(second.states) == f"{where}/reads/islands/b/state"
    assert str(second.params) == f"{where}/reads/islands/b/params"
    # and without such a folder each has its own
    assert as_seen_by("a").states == RUN / "checkpoints" / "state"
    assert as_seen_by("b").states == RUN / "work" / "island-b" / "checkpoints" / "state"


def test_islands_of_one_machine_share_the_cache_of_documents():
    assert as_seen_by("b").corpus_cache == as_seen_by("a").corpus_cache == corpus_cache(RUN)
