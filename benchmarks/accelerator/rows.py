"""Rows of the table, which a part prints as one JSON object a line."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["ok", "WRONG", "FAILED", "measured", "not run"]
GOOD: tuple[Verdict, ...] = ("ok", "measured")
"""Verdicts of a row whose part others may follow; WRONG and FAILED make the run fail."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    figure: str
    limit: str = ""
    verdict: Verdict = "measured"
    seconds: float = 0.0


@dataclass(frozen=True)
class Settings:
    """The command line of a part."""

    folder: Path
    """Shared by the parts of one run: weights, rollouts, log-probs."""
    small: bool
    """Tiny shapes, on a CPU."""
    variant: str | None

    def require(self, platform: str) -> None:
        """Ends the part where its library found no accelerator on a machine that has one."""
        if platform == "cpu" and not self.small:
            raise SystemExit("it sees no accelerator here: install its CUDA build")

    def speed(self, text: str) -> str:
        """Return the figure of a speed; a CPU's is left out, for it misleads."""
        return "runs" if self.small else text


def at_most(what: str, value: float, limit: float, form: str = ".2g") -> Row:
    """A row that is right where the value is at most the limit; NaN is wrong."""
    verdict: Verdict = "ok" if value <= limit else "WRONG"
    return Row(what, f"{value:{form}}", f"{limit:{form}}", verdict)


def serve(measure: Callable[[Settings], Iterator[Row]]) -> None:
    """Prints the rows of a part as they come, each with the seconds since the one before."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--variant")
    parser.add_argument("--begun", type=float, default=time.time(), help="of the process")
    options = parser.parse_args()
    last = options.begun
    for row in measure(Settings(options.folder, options.small, options.variant)):
        now = time.time()
        print(json.dumps(asdict(row) | {"seconds": round(now - last, 1)}), flush=True)
        last = now
