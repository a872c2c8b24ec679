"""Some cases of each lane of `make fuzz`: whatever is sent, a value or the parser's own error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.bounds import costly
from tests.fuzz.fast.lanes import LANES, Lane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = [lane for lane in LANES if not lane.may_die]
"""Those that may end the process have their cases in `test_decoder`, where it is a child."""


@cache
def case_of(lane: Lane) -> Callable[[Random], bool]:
    return lane.case()


@pytest.mark.parametrize("lane", HERE, ids=lambda lane: lane.name)
@costly
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


def test_a_lane_says_how_many_cases_it_had() -> None:
    done = fuzz("--only", "roles", "--seed", "5", "--cases", "300")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("done: roles: 300 cases from number 0 of seed 5")
    assert fuzz("--only", "no such").returncode == 2
