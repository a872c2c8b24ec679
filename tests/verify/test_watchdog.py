"""Stages of an examination: timed, and named where they do not end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from runspec.core.process import EXIT_INTERNAL
from verify import watchdog
from verify.timeouts import STAGE_DEADLINES_S
from verify.watchdog import Stages


def test_a_stage_is_overdue_after_its_deadline_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    watched = Stages()
    assert watched.overdue() is None
    with watched.of("rows", "ab", "cd"):
        clock[0] += STAGE_DEADLINES_S["rows"] - 1
        assert watched.overdue() is None
        clock[0] += 2
        found = watched.overdue()
        assert found is not None and (found.name, found.submissions) == ("rows", ("ab", "cd"))
    assert watched.overdue() is None
    assert watched.spent_s == {"rows": STAGE_DEADLINES_S["rows"] + 1}


HANGS = """
import logging, sys, time
from verify import watchdog
from verify.timeouts import STAGE_DEADLINES_S
from verify.client import RunFinished

class Client:
    def heartbeat(self, state):
        print("beat", flush=True)
        {after}
    def release_claims(self, submissions, fault=""): print(*submissions, fault, flush=True)

class Hanging:
    busy_s, checked, stages = 0.0, 0, watchdog.Stages()

logging.basicConfig()
STAGE_DEADLINES_S["prefill checks"], watchdog.HEARTBEAT_S = 0.2, 0.05
with watchdog.heartbeats(Client(), Hanging, logging.getLogger("validator")):
    with Hanging.stages.of("prefill checks", "ab" * 32):
        time.sleep(600)
"""


@pytest.mark.parametrize("after", ["pass", "raise RunFinished"])
def test_a_validator_whose_check_hangs_names_the_submission_and_ends(after: str) -> None:
    """Also where the run is finished meanwhile."""
    script = HANGS.format(after=after)
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == EXIT_INTERNAL
    *beats, released = ended.stdout.splitlines()
    assert set(beats) == {"beat"}
    assert released.startswith("ab" * 32 + " prefill checks did not end after 0 s")
    assert "at submission abababababab: this process ends" in ended.stderr
