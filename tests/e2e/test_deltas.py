"""A run that sends what changed: followers fetch little, late joiners an anchor and deltas."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from broadcast.layout import manifest_name, stored_versions
from broadcast.manifest import WeightsManifest, open_manifest
from runspec.core.spec.run_files import versions_in, weights_folder
from tests.e2e.quick import QuickRun
from tests.harness import LiveRun

pytestmark = pytest.mark.slow

STEPS = 20  # enough that four are left when the sampler is back
DELTAS = {
    "broadcast.format": "delta",
    "broadcast.anchor_every": 128,  # so that a joiner never meets a fresh anchor
    # Of bf16 weights a small rate changes few; of float32 ones it would change them all.
    "broadcast.dtype": "bfloat16",
    "samplers.volunteers.dtype": "bfloat16",
    "learner.compute_dtype": "bfloat16",
    "optimizer.lr": 5e-6,
}
FETCHED = re.compile(r"version (\d+) fetched( from .*)?: (\d+) bytes over the network for (\d+),")
WAY = r"from {} version (\d+) and deltas ([\d, ]+)"


def log(run: LiveRun, role: str) -> str:
    path = run.dir / "logs" / f"{role}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def manifest(run: LiveRun, version: int) -> WeightsManifest:
    data = (run.dir / "store" / "origin" / manifest_name(run.name, version)).read_bytes()
    return open_manifest(data, run=run.name, publishers=None)


def deltas_of(way: str, start: str) -> tuple[int, list[int]]:
    """The version that a fetch started from, `held` or `fetched`, and the deltas onto it."""
    match = re.search(WAY.format(start), way)
    assert match is not None, way
    return int(match[1]), [int(number) for number in match[2].split(", ")]


@pytest.fixture(scope="module")
def finished(runs_dir: Path) -> LiveRun:
    """A bfloat16 run that sends deltas, whose sampler lost its disk on the way."""
    # given a run that sends deltas
    with QuickRun(runs_dir, "deltas", {**DELTAS, "steps": STEPS}) as run:
        run.wait_for_step(5)
        # when its sampler dies with its disk, and joins again with nothing
        os.kill(run.status()["roles"]["volunteers-0"]["pid"], signal.SIGKILL)
        shutil.rmtree(run.dir / "work" / "volunteers-0" / "weights")
        run.wait_until(lambda: log(run, "volunteers-0").count("starting vLLM") == 2, "the joiner")
        # and samples on
        assert len(run.metrics()) + 4 <= STEPS
        run.finish()
    return run


def test_followers_fetch_deltas_and_a_late_joiner_an_anchor_with_the_deltas_after_it(
    finished: LiveRun,
) -> None:
    run = finished
    # then every version but the first was a delta of the one before
    stored = stored_versions(run.dir / "store" / "origin", run.name)
    found = {version: manifest(run, version) for version in stored}
    assert found[0].is_anchor
    assert all(m.base == v - 1 and not m.is_anchor for v, m in found.items() if v)
    # and those who held one fetched what changed, a small part of it
    _, before, after = log(run, "volunteers-0").split("starting: ")
    for text in (before, log(run, "validator-0")):
        fetched = FETCHED.findall(text)
        assert len(fetched) > 3
        assert not fetched[0][1]
        for version, way, received, size in fetched[1:]:
            base, deltas = deltas_of(way, "held")
            assert deltas == list(range(base + 1, int(version) + 1))
            assert int(received) < len(deltas) * int(size) / 5
    # and the joiner went by the anchor and every delta after it
    version, way, received, size = FETCHED.findall(after)[0]
    assert deltas_of(way, "fetched") == (0, list(range(1, int(version) + 1)))
    assert int(received) > int(size) * 0.9
    # and everybody has the bits that were exported
    exported, compared = weights_folder(run.dir), 0
    for role in ("volunteers-0", "validator-0"):
        held = run.dir / "work" / role / "weights"
        for version in set(versions_in(held)) & set(versions_in(exported)):
            names = [folder / f"v{version}" / "model.safetensors" for folder in (held, exported)]
            assert names[0].read_bytes() == names[1].read_bytes(), f"{role}: version {version}"
            compared += 1
    assert compared >= 2


def test_bf16_samplers_are_accepted(finished: LiveRun) -> None:
    # then validators, who rebuilt every version too, agree with the sampler
    summary = json.loads((finished.dir / "summary.json").read_text())
    assert summary["rollouts_rejected"] == 0
    assert sum(line["rejected_rollouts"] for line in finished.metrics()) == 0
    assert max(line["logprob_diff"] for line in finished.metrics()) < 0.02
