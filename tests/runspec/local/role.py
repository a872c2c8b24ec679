"""A small real process that behaves like a role: `python role.py BEHAVIOUR RUN_DIR [ARGUMENT]`."""

from __future__ import annotations

import json
import logging
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.process import RunStopped, not_retried, run_role, stop_event
from runspec.core.run_files import step_folder
from runspec.core.spec.resolved import load_resolved
from verify.formats.batch import FILE_NAME

STEP_S = 0.05


def learner(run_dir: Path, log: logging.Logger) -> None:
    """Trains the steps that are left, one metrics row each, and no rollout was ever right. SIGTERM
    ends it between two; while the run directory holds a file `hold` it waits."""
    stop, spec = stop_event(), load_resolved(run_dir)
    metrics = run_dir / "metrics.jsonl"
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    log.info("starts at step %d", done)
    for step in range(done, spec.steps):
        while stop.wait(STEP_S) or (run_dir / "hold").exists():
            if stop.is_set():
                log.info("told to end")
                return
        row = {"step": step, "time": time.time(), "task_reward": 0.0}
        row |= {"length_error": 9.0, "lag_max": 1}
        write_atomic(step_folder(run_dir, step) / FILE_NAME, b"{}")
        with metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
    version = run_dir / "store" / "origin" / spec.name / "versions" / str(spec.steps)
    write_atomic(version / "manifest.json", b"{}")


def worker(run_dir: Path, log: logging.Logger) -> None:
    """Ends when the last step has its rollouts, or when told."""
    stop, spec = stop_event(), load_resolved(run_dir)
    log.info("working")
    while not (step_folder(run_dir, spec.steps - 1) / FILE_NAME).exists():
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


def stalled(run_dir: Path, log: logging.Logger) -> None:
    raise RunStopped("step 3 stalled", remedy="look at the workers")


@not_retried()
def broken_plugin(run_dir: Path, log: logging.Logger) -> None:
    log.info("loading problems")
    print({"answer": 1}["gold"])


def full_disk(run_dir: Path, log: logging.Logger) -> None:
    """Meets the end of its disk: a limit on file sizes stands for it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    write_atomic(run_dir / "rollouts" / "big.safetensors", bytes(8192))


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


def grading_coordinator(run_dir: Path, log: logging.Logger) -> None:
    """A server that tells of groups which the grader dropped."""
    told = {"groups": 3, "newest": "p7: KeyError: 'gold'\x1b[2J at mine/grading.py:17"}
    status = json.dumps({"waiting_for": "nobody", "dropped_by_grader": told}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(status)

    stop, (host, port) = stop_event(), sys.argv[3].split(":")
    with HTTPServer((host, int(port)), Handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        stop.wait()
        serving.shutdown()


def warm_start(run_dir: Path, log: logging.Logger) -> None:
    log.info("making version 0")
    write_atomic(run_dir / "initial" / "config.json", b"{}")


BEHAVIOURS: dict[str, Callable[[Path, logging.Logger], None]] = {
    behaviour.__name__: behaviour
    for behaviour in (
        learner,
        worker,
        loading,
        stubborn,
        dying,
        stalled,
        broken_plugin,
        full_disk,
        server,
        grading_coordinator,
        warm_start,
    )
}

if __name__ == "__main__":
    name, run_dir = sys.argv[1], Path(sys.argv[2])
    sys.exit(run_role(name, lambda log: BEHAVIOURS[name](run_dir, log)))
