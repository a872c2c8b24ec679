"""Worker and evaluator, and `python -m sampler`: graders by themselves, and solve rates."""

from __future__ import annotations

import argparse
import logging

from runspec.core.process import Role, leave, not_retried, stop_event
from sampler.engine.processes import restart_with_libraries

GRACE_S = 3.0
"""Longest time from SIGTERM to the end. The worker needs half of it to submit finished leases and
to give the others back. After it, a process that still starts or waits for a server is ended. A
worker may be killed at any point without a loss."""


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run the command; return its exit code."""
    from sampler.evaluation import ask, solve_rates
    from sampler.tasks import check, grade

    parser = argparse.ArgumentParser(prog="python -m sampler", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    grade.add_commands(commands)
    solve_rates.add_command(commands)
    check.add_command(commands)
    ask.add_command(commands)
    options = parser.parse_args(arguments)
    code: int = options.call(options)
    return code


def work(role: Role, log: logging.Logger) -> None:
    """Sample for a run until it is finished."""
    restart_with_libraries()  # before what takes seconds to import
    stop = stop_event(GRACE_S)
    with not_retried():  # imported after the signals are caught
        from sampler.worker import work

    work(role, log, stop)


def evaluate(role: Role, log: logging.Logger) -> None:
    """Evaluate a run's versions until its last one."""
    restart_with_libraries()
    stop = stop_event(GRACE_S)
    with not_retried():
        from sampler.evaluation.evaluator import evaluate_versions

    evaluate_versions(role, log, stop)


if __name__ == "__main__":
    restart_with_libraries()  # before `main` imports what takes seconds
    leave(main())
