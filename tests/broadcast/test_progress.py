"""The line that a long fetch says."""

from __future__ import annotations

import logging
import re

from broadcast.progress import Progress

LOG = logging.getLogger("test")


def test_a_line_says_what_came_since_the_last_and_from_whom() -> None:
    # given a server that has sent something before this fetch, and two that send now
    received = {"http://a": 500, "http://b": 0, "http://c": 70}
    progress = Progress("version 7", 4_000_000, lambda: received, LOG)
    received |= {"http://a": 1_500_500, "http://b": 500_000}
    progress.add(2_000_000)

    line = progress.line()

    assert re.fullmatch(
        r"version 7: 2\.0 of 4\.0 MB, [\d,.]+ MB/s, [\d,]+ s left, from http://a 75%, http://b 25%",
        line,
    )


def test_a_standstill_is_said() -> None:
    progress = Progress("version 7", 4_000_000, lambda: {"http://a": 500}, LOG)

    assert progress.line() == "version 7: 0.0 of 4.0 MB, 0.0 MB/s, from no server just now"
