"""Some cases of each lane of `make fuzz`: whatever is sent, a value or the parser's own error."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.__main__ import Fault, Progress, watch
from tests.fuzz.bounds import costly
from tests.fuzz.fast.child import PLACE
from tests.fuzz.fast.lanes import LANES, Lane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = [lane for lane in LANES if not lane.may_die]
"""Those that may end the process have their cases in `test_decoder`, where it is a child."""


@cache
def case_of(lane: Lane) -> Callable[[Random], bool]:
    return lane.case()


@pytest.mark.parametrize("lane", HERE, ids=lambda lane: lane.name)
@settings(costly, max_examples=costly.max_examples // 4)
@given(seed=st.integers(0, 2**48))
def test_lanes(lane: Lane, seed: int) -> None:
    case_of(lane)(Random(seed))


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def watched(lane: Lane, seen: Path, code: str) -> Progress:
    """A lane whose process runs some code while it is at case 7."""
    seen.write_bytes(PLACE.pack(7, 2, 0.5))
    progress = Progress(lane, 3, 0, 0)
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        watch(child, progress, seen, (0, 0.0), until=math.inf)
    return progress


DIES = "import os; os.abort()"
IN_ITS_OWN, IN_OURS = LANES[-1], LANES[0]


def test_a_death_is_counted_where_the_parser_has_a_process_of_its_own(tmp_path: Path) -> None:
    progress = watched(IN_ITS_OWN, tmp_path / "seen", DIES)
    assert progress.deaths == {"SIGABRT": [7]}
    assert (progress.done, progress.taken) == (8, 2)
    assert "1 ended by SIGABRT (as case 7)" in progress.line()


@pytest.mark.parametrize(
    ("lane", "code"),
    [(IN_OURS, DIES), (IN_OURS, "raise SystemExit(1)"), (IN_ITS_OWN, "raise SystemExit(1)")],
)
def test_a_fault_names_its_case_and_how_to_make_it_again(
    tmp_path: Path, lane: Lane, code: str
) -> None:
    with pytest.raises(Fault) as fault:
        watched(lane, tmp_path / "seen", code)
    assert f"python -m tests.fuzz --only '{lane.name}' --seed 3 --case 7" in str(fault.value)


def test_a_lane_says_how_many_cases_it_had() -> None:
    done = fuzz("--only", "roles", "--seed", "5", "--cases", "300")
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()  # on a slow machine it says before how far it is
    assert last.startswith("done: roles: 300 cases from number 0 of seed 5")
    assert fuzz("--only", "no such").returncode == 2
