"""Campaigns: properties over drawn inputs, 500 seeded cases each, a million in `make fuzz`.

No profile: one that is loaded counts for all modules that are imported after it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

CASES = int(os.environ.get("FUZZ_CASES", "500"))
campaign = settings(
    max_examples=CASES,
    deadline=None,
    # In `make test` the same cases every time; `make fuzz` names a new seed for each batch.
    derandomize="FUZZ_CASES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
