"""Islands are killed, cut off, slowed and starved of disk at random times, and nothing is lost.

Real runs of three islands over documents, two of which suffice for a commit. One fault at a time,
at a random moment; once all islands contribute again, the next one. Every run must come to its end
by itself: all islands hold the same bits, the audit is clean, and each share of each manifest was
trained once by a contributor or is named as dropped in its step's record. Needs root, for small
disks.

Seconds without a commit are bounded by the grace time and two of the longest steps that nobody
disturbed. A cut link adds the seconds after which a share is said to be lost. Where the coordinator
was away, the islands have to wait for it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path

import numpy as np

from learner_jax.corpus.packed import open_corpus
from runspec.core.run_files import corpus_cache, initial_model, step_folder
from tests.campaigns._island_faults import (
    MindedRun,
    cut,
    fill_disk,
    kill,
    restart_coordinator,
    slow,
)
from tests.learner_jax.islands.island_runs import LOG, spec_of
from tests.learner_jax.test_document_runs import make_files
from verify.coordinator.machine.events import IslandsCommitted
from verify.formats.batch import FILE_NAME as BATCH_FILE
from verify.formats.batch import open_ranges, rows_per_step

SEEDS = [int(seed) for seed in os.environ.get("ISLANDS_CHAOS_SEEDS", "0 1").split()]
MINUTES = float(os.environ.get("ISLANDS_CHAOS_MINUTES", "6"))
"""Of faults, in each run."""
STEPS = int(os.environ.get("ISLANDS_CHAOS_STEPS", "400"))
NAMES, GRACE_S, CALM = "abc", 2.0, 6
"""Islands; grace; steps before the first fault."""
FAULTS = {
    "trunk killed": (kill, "a"),
    "island killed": (kill, "bc"),
    "coordinator restarted": (restart_coordinator, "a"),
    "link cut": (cut, "abc"),
    "island slow": (slow, "abc"),
    "disk full": (fill_disk, "abc"),
}


@dataclass(frozen=True)
class Happened:
    """One fault; times are seconds since the epoch."""

    kind: str
    begun: float
    over: float
    """The cause is gone."""
    whole: float
    """All islands contribute again."""


def run() -> dict[str, dict[str, object]]:
    """What each kind of fault cost.

    Raises:
        AssertionError: a run did not end as it must.
    """
    happened: list[tuple[Happened, float, float]] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        (files := Path(folder) / "files").mkdir()
        make_files(files)
        for seed in SEEDS:
            happened += _one(Path(folder) / f"seed-{seed}" / "runs" / "run", files, seed)
    found: dict[str, dict[str, object]] = {}
    for kind in FAULTS:
        of_kind = [each for each in happened if each[0].kind == kind]
        if of_kind:
            found[kind] = {
                "times": len(of_kind),
                "longest seconds without a commit": round(max(gap for _, gap, _ in of_kind), 1),
                "of these the cause": round(max(cause for _, _, cause in of_kind), 1),
                "longest seconds until all contribute": round(
                    max(each.whole - each.over for each, _, _ in of_kind), 1
                ),
            }
    return found


def _one(folder: Path, files: Path, seed: int) -> list[tuple[Happened, float, float]]:
    """Faults of one run, each with seconds without a commit, and those that its cause explains."""
    rng = random.Random(seed)
    spec = spec_of(
        files,
        NAMES,
        steps=STEPS,
        updates=4,
        every=4,
        publish_every=2,
        quorum=len(NAMES) - 1,
        grace=f"{GRACE_S:g}s",
        overlap=seed % 2,
    )
    happened: list[Happened] = []
    kinds = cycle(rng.sample([*FAULTS], len(FAULTS)))
    with MindedRun(folder, spec, files / "tokenizer", small=True) as minded:
        minded.all_contribute(CALM)
        end = time.monotonic() + 60.0 * MINUTES
        while time.monotonic() < end and minded.committed < STEPS - CALM:
            minded.pass_time(rng.uniform(0.0, 3.0))
            kind = next(kinds)
            cause, names = FAULTS[kind]
            name, begun = rng.choice(names), time.time()
            cause(minded, name, rng)
            over = time.time()
            minded.all_contribute(2)
            happened.append(Happened(kind, begun, over, time.time()))
            print(seed, minded.committed, name, happened[-1], file=sys.stderr, flush=True)
        minded.finish()
        commits = minded.commits()
        _check_end(minded, [event.record.step for event in commits])
        _check_rows(minded, commits)
    islands = spec.learner.islands
    assert islands is not None
    return _gaps(happened, [event.at for event in commits], islands.silence)


def _check_end(minded: MindedRun, steps: Sequence[int]) -> None:
    """All steps are committed, all islands hold the same, the audit is clean."""
    assert list(steps) == list(range(STEPS))
    run = minded.run
    first, *others = (run.arrays(name) for name in run.names)
    assert first["version"] == [STEPS]
    for other in others:
        for what in ("theta", "momentum", "version"):
            np.testing.assert_array_equal(other[what], first[what])
    words = [sys.executable, "-m", "verify", "audit", str(run.path)]
    audited = subprocess.run(
        [*words, "--root-key", run.root.public_hex], capture_output=True, text=True, check=False
    )
    assert audited.returncode == 0, audited.stdout[-3000:] + audited.stderr[-3000:]


def _check_rows(minded: MindedRun, commits: Sequence[IslandsCommitted]) -> None:
    """Each row is of one island, which contributed it with the row's weight, or is dropped."""
    run = minded.run
    cache = corpus_cache(run.path)
    corpus = open_corpus(run.spec, initial_model(run.path), cache, LOG)
    rows, following = rows_per_step(run.spec), 0
    for event in commits:
        record = event.record
        data = (step_folder(run.path, record.step) / BATCH_FILE).read_bytes()
        manifest = open_ranges(
            data, coordinators=None, run=run.spec.name, step=record.step, rows_per_step=rows
        )
        weights = {each.island: each.weight for each in record.contributors}
        dropped = {each.island for each in record.dropped}
        assert {share.island for share in manifest.shares} == weights.keys() | dropped
        for share in manifest.shares:
            assert share.first == following
            following = share.last
            if share.island in weights:
                trained = corpus.read(share.first, share.last).weights
                assert weights[share.island] == trained.sum(dtype=np.float64)
    assert following == rows * STEPS


def _gaps(
    happened: Sequence[Happened], commits: Sequence[float], silence_s: float
) -> list[tuple[Happened, float, float]]:
    """The longest time without a commit around each fault, and how much of it is the cause's.

    Raises:
        AssertionError: it is longer than grace, two steps and the cause.
    """
    between = list(pairwise(commits))
    disturbed = [(each.begun, each.whole) for each in happened]
    calm = max(
        after - before
        for before, after in between
        if not any(before < whole and begun < after for begun, whole in disturbed)
    )
    print("longest calm step", round(calm, 2), file=sys.stderr)
    found = []
    for each in happened:
        gaps = [b - a for a, b in between if a < each.whole and each.begun < b]
        cause = each.over - each.begun if each.kind == "coordinator restarted" else 0.0
        cause += silence_s if each.kind == "link cut" else 0.0
        gap = max(gaps, default=0.0)
        assert gap <= GRACE_S + 2.0 * calm + cause, (each, gap, calm)
        found.append((each, gap, cause))
    return found
