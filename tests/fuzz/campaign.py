"""Campaigns: properties over drawn inputs, 500 seeded cases each, others with FUZZ_CASES.

No profile: one that is loaded counts for all modules that are imported after it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

CASES = int(os.environ.get("FUZZ_CASES", "500"))
campaign = settings(
    max_examples=CASES,
    deadline=None,
    # In `make test` the same cases every time; with FUZZ_CASES those of `--hypothesis-seed`.
    derandomize="FUZZ_CASES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
