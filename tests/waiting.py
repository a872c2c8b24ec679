"""Waiting for a condition: the one place in the tests where time passes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

HANG_S = 1200.0
"""After which whatever a test waits for counts as hanging."""
POLL_S = 0.005


def eventually(
    condition: Callable[[], Any],
    what: str,
    *,
    hopeless: Callable[[], str] = str,
    context: Callable[[], str] = str,
    poll_s: float = POLL_S,
) -> None:
    """Returns once the condition holds, and fails where it never does.

    Args:
        condition: asked again and again.
        what: names it.
        hopeless: why there is no use in waiting on; empty while there is.
        context: what to show with a failure.
        poll_s: between two looks.
    """
    end = time.monotonic() + HANG_S
    while not condition():
        if why := hopeless():
            pytest.fail(f"{why} before {what}\n{context()}")
        if time.monotonic() > end:
            pytest.fail(f"not within {HANG_S:g} s: {what}\n{context()}")
        time.sleep(poll_s)


def one_ended(processes: Iterable[subprocess.Popen[bytes]]) -> str:
    """For `hopeless`: says so once a process has ended."""
    codes = [process.poll() for process in processes]
    return "" if set(codes) == {None} else f"a process ended ({codes})"
