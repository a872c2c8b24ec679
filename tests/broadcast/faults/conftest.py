"""What the tests of faults share: the patience of a waiting reader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SLACK_S = 4.0
"""What a busy machine may add to a deadline. (A wait that forgets its deadline lasts longer.)"""


@contextmanager
def within(deadline_s: float) -> Iterator[None]:
    """The block does not outlast its deadline."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < deadline_s + SLACK_S, f"{took:.1f} s where {deadline_s:g} s were allowed"
