"""Two islands of unlike meshes as a user starts them: one is killed, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from runspec.core.errors import UserError
from runspec.core.run_files import BESIDE_NAME, island_folder, numbered
from runspec.local.rollback import roll_back
from tests.e2e.test_supervised import SPEC, Reads, python_module, write_files
from tests.harness import runspec

pytestmark = pytest.mark.slow

STEPS = 9
ISLANDS = """
islands:
  members: [{name: a}, {name: b, hardware: {kind: cpu, count: 1}, mesh: {fsdp: 1}}]
  codec: {kind: int8}
  overlap: 1
"""


def spec_text() -> str:
    """The spec of a small pretraining run, with two islands: one on two devices, one on one."""
    text = dedent(SPEC).replace("steps: 12", f"steps: {STEPS}")
    lines = text.replace("decay_updates: 22", "decay_updates: 16").splitlines()
    at = lines.index("learner:") + 1
    return "\n".join([*lines[:at], *(f"  {line}" for line in ISLANDS.split("\n")), *lines[at:]])


@pytest.fixture(scope="module")
def finished(runs_dir: Path) -> Reads:
    # given two islands that overlap steps
    write_files(runs_dir)
    (runs_dir / "spec.yaml").write_text(spec_text())
    with Reads(runs_dir, "islands") as run:
        # when the second is killed in the middle
        run.wait_for_step(3)
        island = run.pids()["island-b"]
        assert island is not None
        os.kill(island, signal.SIGKILL)
        run.finish()
    return run


def test_both_islands_end_with_the_same_outer_parameters(finished: Reads) -> None:
    ends = []
    for folder in (finished.dir, island_folder(finished.dir, "island-b")):
        states = folder / "checkpoints" / "state"
        newest = states / f"step_{numbered(states, 'step_')[-1]}" / BESIDE_NAME
        assert np.load(newest / "version.npy") == [STEPS]
        ends.append([np.load(newest / f"{name}.npy") for name in ("theta", "momentum")])
    for a, b in zip(*ends, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.abs(a).max() > 0
    # and the documents were encoded once for both
    caches = [path.parent for path in finished.runs_dir.parent.rglob(".cache/corpus")]
    assert caches == [finished.runs_dir.parent / ".cache"]


def test_every_step_has_both_shares_and_the_record_holds(finished: Reads) -> None:
    rows = finished.metrics()
    assert [row["step"] for row in rows] == list(range(STEPS))
    commits = [row["islands"] for row in rows if row["islands"] is not None]
    assert {tuple(each["contributors"]) for each in commits} == {("a", "b")}
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2
    python_module("verify", "audit", finished.dir)


def test_its_status_and_summary_tell_of_the_exchange(finished: Reads) -> None:
    told = runspec("status", finished.dir, "--json", timeout_s=60)
    assert told.returncode == 0, told.stderr
    status = json.loads(told.stdout)
    assert status["islands"]["contributors"] == ["a", "b"]
    assert status["roles"]["island-b"]["restarts"] == 1
    summary = json.loads((finished.dir / "summary.json").read_text())["islands"]
    assert summary["dropped"] == {}
    assert summary["received_bytes"] > 0 and summary["sent_bytes"] >= 2 * summary["received_bytes"]


def test_it_cannot_go_back_into_the_middle_of_overlapping_steps(finished: Reads) -> None:
    with pytest.raises(UserError, match=r"no full state of version 2: with learner\.islands"):
        roll_back(finished.dir, 2)
