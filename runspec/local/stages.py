"""What roles are at that takes long, by the newest line that each has logged itself."""

from __future__ import annotations

import re
from pathlib import Path

from runspec.local.children import last_lines

_OWN_LINE = re.compile(r"--- |\d{4}-\d\d-\d\d [\d:,]+ [A-Z] ")
"""How lines of a log begin that a role, or its start, has written: libraries write there too."""
_STAGE = re.compile(r"\b(loading vLLM|compiling the step)\b")
_STAGE_LINES = 1000


def stages(logs: Path) -> dict[str, str]:
    """The roles whose newest line of their own says that they are at something long, and what."""
    found = {}
    for log in sorted(logs.glob("*.log")):
        own = (line for line in reversed(last_lines(log, _STAGE_LINES)) if _OWN_LINE.match(line))
        if stage := _STAGE.search(next(own, "")):
            found[log.stem] = stage[1]
    return found
