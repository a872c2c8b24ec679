"""The last error of a role's log: one line of it, and its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.local.role_logs import RoleError, last_error

STARTED = "--- 2026-01-01 10:00:00 starting: python -m verify validator\n"
ERROR = "2026-01-01 10:00:01,000 E validator reward.r: it broke\n  remedy: mend it\n"
TRACEBACK = """\
Traceback (most recent call last):
  File "mine.py", line 3, in load

ValueError: odd

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "mine.py", line 9, in <module>
KeyError: 'gold'
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        (STARTED + "2026-01-01 10:00:01,000 I validator working\n", None),
        (ERROR, RoleError("reward.r: it broke", "mend it")),
        (ERROR + "2026-01-01 10:00:02,000 I x ends\n", RoleError("reward.r: it broke", "mend it")),
        ("2026-01-01 10:00:01,000 E sampler near no room\n", RoleError("no room")),
        (ERROR + TRACEBACK, RoleError("KeyError: 'gold'")),
        ("2026-01-01 10:00:01,000 E x internal error\n" + TRACEBACK, RoleError("KeyError: 'gold'")),
        (ERROR + STARTED, None),
        ("2026-01-01 10:00:01,000 E x a\x1b[2Jb" + "c" * 9000, RoleError("a?[2Jb" + "c" * 794)),
    ],
)
def test_the_last_error_since_the_last_start_is_found(
    tmp_path: Path, text: str, found: RoleError | None
) -> None:
    log = tmp_path / "validator-0.log"
    assert last_error(log) is None
    log.write_text(text)
    assert last_error(log) == found
