"""Some cases of each fuzz lane; `python -m tests.campaigns fuzz` gives each many more."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.fuzz.bounds import run
from tests.fuzz.lanes import LANES

pytestmark = pytest.mark.slow

CASES = 40


@pytest.mark.parametrize("lane", LANES.values(), ids=LANES)
def test_a_case_ends_with_a_value_or_the_parsers_own_exception(lane):
    found = run(lane, settings(max_examples=CASES, derandomize=True))
    assert found[True] and found[False], "the lane has sound cases, and others"
