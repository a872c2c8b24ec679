"""Figures of a benchmark that is a campaign too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def printed(name: str) -> list[dict[str, Any]]:
    """The JSON objects that a benchmark prints, one a line."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}"],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
