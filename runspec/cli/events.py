"""`runspec events`: what happened to a run, oldest first, or as it happens."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from runspec.cli.output import reader_gone
from runspec.local.run_dir import find_run
from runspec.local.state import EventRow, RunState

POLL_S = 0.25


def events_command(run: str, follow: bool, as_json: bool, runs_dir: Path) -> int:
    """Prints events until their end, or with `follow` until Ctrl-C; returns the exit code."""
    run_dir = find_run(run, runs_dir)
    with closing(RunState(run_dir)) as state:
        try:
            last = 0
            while True:
                new = state.events(after=last)
                _print(new, as_json)
                if not follow or reader_gone():
                    return 0
                last = new[-1].id if new else last
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            return 0


def _print(events: Sequence[EventRow], as_json: bool) -> None:
    for event in events:
        print(json.dumps(asdict(event)) if as_json else event_line(event), flush=True)


def event_line(event: EventRow) -> str:
    """One event, for people."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
    return f"{at}  {event.role}: {event.text}"
