"""`python -m sampler`: a sampling worker, its graders by themselves, and solve rates."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from pathlib import Path

from runspec.core.process import not_retried, run_role, stop_event
from sampler.measuring import command as measuring
from sampler.tasks import check
from sampler.tasks.grading import command as grading

GRACE_S = 3.0
"""Longest time from SIGTERM to the end. The worker needs half of it to submit finished leases and
to give the others back. After it, a process that still starts or waits for a server is ended. A
worker may be killed at any point without a loss."""


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sampler", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    work = commands.add_parser("work", help="sample for a run until it is finished")
    work.add_argument("--run", required=True, help="the run's name")
    work.add_argument("--coordinator", required=True, metavar="URL")
    work.add_argument(
        "--weights", required=True, action="append", metavar="URL", help="relay; may be repeated"
    )
    work.add_argument("--public-key", required=True, metavar="HEX", help="the run's root key")
    work.add_argument("--key", required=True, type=Path, metavar="FILE", help="the worker's own")
    work.add_argument("--dir", required=True, type=Path, help="keeps fetched versions")
    work.add_argument("--pool", required=True, metavar="NAME", help="sampler pool of the spec")
    grading.add_commands(commands)
    measuring.add_command(commands)
    check.add_command(commands)
    options = parser.parse_args(arguments)
    if options.command == measuring.NAME:
        return measuring.run(options)
    if options.command == check.NAME:
        return check.run(options)
    if options.command in grading.NAMES:
        return grading.run(options)
    return run_role(f"sampler {options.pool}", lambda log: _work(options, log))


def _work(options: argparse.Namespace, log: logging.Logger) -> None:
    stop = stop_event()
    threading.Thread(target=_leave, args=(stop,), daemon=True).start()
    with not_retried():
        from sampler.worker.start import (  # after the signals: its imports take seconds
            WorkerOptions,
            work,
        )

    values = vars(options)
    work(WorkerOptions(**{k: v for k, v in values.items() if k != "command"}), log, stop)


def _leave(stop: threading.Event) -> None:
    """End the process if it waits (for a coordinator, for the start of an engine) beyond the
    grace."""
    stop.wait()
    threading.Event().wait(GRACE_S)
    os._exit(0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # vLLM's own shutdown takes seconds, and nothing is left to save
