"""Logs to trackio what comes as lines of JSON. It runs in trackio's own environment, and imports
only trackio and the standard library.

The first line opens a run: {"project", "run", "config"}. {"at", "figures", "rollouts"} is an entry.
{"flush": true} asks until all entries are in the database. The first and the last kind are answered
with an empty line. The end of the input ends the run.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path

import trackio
from trackio.sqlite_storage import SQLiteStorage

FLUSH_S = 30.0
"""Longest time that trackio may take to write what was logged."""


def main() -> int:
    # trackio prints to standard output; answers alone go there.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # A script whose monitor was killed may still be writing: its lock goes when it goes.
    with Path(os.environ["TRACKIO_DIR"], "script.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first = json.loads(sys.stdin.readline())
        project, name = first["project"], first["run"]
        entries = SQLiteStorage.get_log_count(project, name)
        run = trackio.init(
            project=project,
            name=name,
            config=first["config"],
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        answers.write("\n")
        for line in sys.stdin:
            message = json.loads(line)
            if "flush" in message:
                wait_for(entries, project, name)
                answers.write("\n")
                continue
            entries += 1
            values = {named(key): value for key, value in message["figures"].items()}
            if message["rollouts"]:
                values["rollouts"] = trackio.Table(data=message["rollouts"])
            run.log(values, step=message["at"])
        trackio.finish()
    return 0


def named(key: str) -> str:
    """Return a key that trackio does not keep for itself."""
    return "trained_step" if key == "step" else key


def wait_for(entries: int, project: str, name: str) -> None:
    """Wait until the database has as many entries.

    Raises:
        TimeoutError: trackio has not written them.
    """
    deadline = time.monotonic() + FLUSH_S
    while (there := SQLiteStorage.get_log_count(project, name)) < entries:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"trackio has {there} of {entries} entries after {FLUSH_S:g} s")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
