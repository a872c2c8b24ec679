"""A seeded smoke of each fuzz lane; `python -m tests.campaigns fuzz` gives each a million cases."""

from __future__ import annotations

from random import Random

import pytest

from tests.fuzz.bounds import OPEN
from tests.fuzz.lanes import LANES, Lane

CASES = 100


@pytest.mark.parametrize("lane", LANES.values(), ids=LANES)
def test_lanes(lane: Lane) -> None:
    with OPEN:
        case = lane.case()
        sound = sum(case(Random(number)) for number in range(CASES))
    assert sound < CASES
