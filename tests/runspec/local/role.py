"""A small real process that behaves like a role: `python role.py BEHAVIOUR RUN_DIR [ARGUMENT]`.

It imports little, since tests start it often.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.process import not_retried, run_role, stop_event

STEP_S = 0.05


def learner(run_dir: Path, log: logging.Logger) -> None:
    """Trains the steps that are left, one metrics row each, and no rollout was ever right. SIGTERM
    ends it between two; it waits while the run directory holds a file `hold`, from the step on that
    the file names."""
    stop, spec = stop_event(), spec_of(run_dir)
    metrics = run_dir / "metrics.jsonl"
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    log.info("starts at step %d", done)
    for step in range(done, spec["steps"]):
        while stop.wait(STEP_S) or held(run_dir, step):
            if stop.is_set():
                log.info("told to end")
                return
        row = {"step": step, "time": time.time(), "task_reward": 0.0}
        row |= {"length_error": 9.0, "lag_max": 1}
        write_atomic(batch(run_dir, step), b"{}")
        with metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
    version = run_dir / "store/origin" / spec["name"] / "versions" / str(spec["steps"])
    write_atomic(version / "manifest.json", b"{}")


def spec_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "spec.json").read_text())


def batch(run_dir: Path, step: int) -> Path:
    return run_dir / "rollouts" / f"step_{step}" / "batch.json"


def held(run_dir: Path, step: int) -> bool:
    try:
        return step >= int((run_dir / "hold").read_text() or 0)
    except FileNotFoundError:
        return False


def worker(run_dir: Path, log: logging.Logger) -> None:
    """Ends when the last step has its rollouts, or when told."""
    stop, last = stop_event(), spec_of(run_dir)["steps"] - 1
    log.info("working")
    while not batch(run_dir, last).exists():
        if stop.wait(0.02):
            return


def stubborn(run_dir: Path, log: logging.Logger) -> None:
    """Hears no SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log.info("ignoring SIGTERM")
    while True:
        signal.pause()


def dying(run_dir: Path, log: logging.Logger) -> None:
    for number in range(40):
        log.info("line %d", number)
    raise UserError("the cable is cut", place="socket 7", remedy="mend it")


@not_retried()
def broken_plugin(run_dir: Path, log: logging.Logger) -> None:
    log.info("loading problems")
    print({"answer": 1}["gold"])


def loading(run_dir: Path, log: logging.Logger) -> None:
    """Loads for as long as the run directory holds a file `hold`, as a sampler does."""
    stop = stop_event()
    log.info("loading vLLM with version 0, 5 problems")
    print("INFO 11-23 15:03:40 [core.py:78] a library's own line", flush=True)
    while (run_dir / "hold").exists() and not stop.wait(STEP_S):
        pass
    log.info("version 0 loaded in 1.0 s")
    stop.wait()


def server(run_dir: Path, log: logging.Logger) -> None:
    stop = stop_event()
    host, port = sys.argv[3].split(":")
    with socket.create_server((host, int(port))):
        log.info("listening")
        stop.wait()


def warm_start(run_dir: Path, log: logging.Logger) -> None:
    log.info("making version 0")
    write_atomic(run_dir / "initial" / "config.json", b"{}")


if __name__ == "__main__":
    name, run_dir = sys.argv[1], Path(sys.argv[2])
    sys.exit(run_role(name, lambda log: globals()[name](run_dir, log)))
