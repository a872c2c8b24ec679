"""5,000 honest rollouts of several turns, sampled in every way an engine may, are all judged right.

Each batch is sampled by an engine with room for all, by one that preempts and prefills again in
chunks, and by that one again, with earlier turns in its prefix cache; in another order each time.
Every token must be the one that transformers and the noise give, and every proof must hold.
ROLLOUTS chooses another number.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from random import Random

from tests.sampler.engine.conftest import KINDS
from tests.sampler.engine.models import Reference, running_engine, sample, save_version
from tests.sampler.engine.test_turns import assert_one_record, talks

ROLLOUTS = int(os.environ.get("ROLLOUTS", "5000"))


def run() -> dict[str, object]:
    """How many rollouts were judged.

    Raises:
        AssertionError: one of them is not what it should be.
    """
    judged, seed, turns = 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="turns-") as folder, ExitStack() as up:
        version = save_version(Path(folder) / "version")
        ways = [up.enter_context(running_engine(version, **KINDS[k])) for k in ("plain", "cramped")]
        reference = Reference(version)
        while judged < ROLLOUTS:
            for engine in (*ways, ways[-1]):
                requests = talks(6, 4, seed=seed % 256, most=2 + seed % 3)
                Random(judged).shuffle(requests)
                sampled = sample(engine, requests)
                assert_one_record(reference, requests, sampled)
                judged += len(sampled)
                turns += sum(len(each.turns) for each in sampled)
            seed += 1
            print(f"{judged} of {ROLLOUTS} rollouts", file=sys.stderr, flush=True)
    return {"rollouts": judged, "turns": turns, "wrong": 0}
