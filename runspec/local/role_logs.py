"""Reads a role's log: the last error that it has logged, and the long stage that it is in."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from runspec.core.errors import one_line
from runspec.local.children import STARTING, last_lines

_LOG_LINES = 2000
_MAX_THING, _MAX_REMEDY = 800, 600
# Time, level and role before the message, as `runspec.core.process.setup_logging` writes them.
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ ([A-Z]) (?:sampler )?\S+ (.*)")
_TRACEBACK = "Traceback (most recent call last):"
_REMEDY = "  remedy: "
_OWN_LINE = re.compile(r"--- |\d{4}-\d\d-\d\d [\d:,]+ [A-Z] ")
"""How lines of a log begin that a role, or its start, has written: libraries write there too."""
_STAGE = re.compile(r"\b(loading vLLM|compiling the step)\b")
_STAGE_LINES = 1000


@dataclass(frozen=True)
class RoleError:
    """An error for people; each text is one printable line."""

    thing: str
    """The fault, with its place."""
    remedy: str = ""


def last_error(log: Path) -> RoleError | None:
    """Returns the last error of a role since its last start; None where its log has none.

    That is a line logged as an error, with the remedy below it, or the last line of a traceback.
    """
    found: RoleError | None = None
    in_traceback = False
    for line in last_lines(log, _LOG_LINES):
        logged = _LOGGED.match(line)
        if line.startswith(STARTING):
            found, in_traceback = None, False
        elif logged is not None:
            in_traceback = False
            if logged[1] in "EC":
                found = RoleError(one_line(logged[2], _MAX_THING))
        elif line == _TRACEBACK:
            in_traceback = True
        elif in_traceback and line and not line[0].isspace():
            found, in_traceback = RoleError(one_line(line, _MAX_THING)), False
        elif found is not None and line.startswith(_REMEDY):
            found = replace(found, remedy=one_line(line.removeprefix(_REMEDY), _MAX_REMEDY))
    return found


def stages(logs: Path) -> dict[str, str]:
    """The roles whose newest line of their own says that they are at something long, and what."""
    found = {}
    for log in sorted(logs.glob("*.log")):
        own = (line for line in reversed(last_lines(log, _STAGE_LINES)) if _OWN_LINE.match(line))
        if stage := _STAGE.search(next(own, "")):
            found[log.stem] = stage[1]
    return found
