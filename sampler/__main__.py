"""`python -m sampler`: a sampling worker, the evaluator, graders by themselves, and solve rates."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

from runspec.core.process import not_retried, run_role, stop_event
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
    work = commands.add_parser("work", help="sample for a run until it is finished")
    evaluate = commands.add_parser("evaluate", help="evaluate a run's versions until its last one")
    for role in (work, evaluate):
        role.set_defaults(call=_role)
        role.add_argument("--run", required=True, help="the run's name")
        role.add_argument("--coordinator", required=True, metavar="URL")
        role.add_argument(
            "--weights", required=True, action="append", metavar="URL", help="relay; several may be"
        )
        role.add_argument("--public-key", required=True, metavar="HEX", help="the run's root key")
        role.add_argument("--key", required=True, type=Path, metavar="FILE", help="the role's own")
        role.add_argument("--dir", required=True, type=Path, help="keeps fetched versions")
        role.add_argument("--metrics", metavar="HOST:PORT", help="serves Prometheus metrics there")
    work.add_argument("--pool", required=True, metavar="NAME", help="sampler pool of the spec")
    grade.add_commands(commands)
    solve_rates.add_command(commands)
    check.add_command(commands)
    ask.add_command(commands)
    options = parser.parse_args(arguments)
    code: int = options.call(options)
    return code


def _role(options: argparse.Namespace) -> int:
    values = {k: value for k, value in vars(options).items() if k not in ("command", "call")}
    if options.command == "evaluate":
        return run_role("evaluator", lambda log: _evaluate(values, log))
    return run_role(f"sampler {options.pool}", lambda log: _work(values, log))


def _work(values: dict[str, Any], log: logging.Logger) -> None:
    stop = stop_event(GRACE_S)
    with not_retried():  # imported after the signals are caught: it takes seconds
        from sampler.worker.start import WorkerOptions, work

    work(WorkerOptions(**values), log, stop)


def _evaluate(values: dict[str, Any], log: logging.Logger) -> None:
    stop = stop_event(GRACE_S)
    with not_retried():
        from sampler.evaluation.evaluator import evaluate_versions
        from sampler.role import RoleOptions

    evaluate_versions(RoleOptions(**values), log, stop)


if __name__ == "__main__":
    restart_with_libraries()  # before `main` imports what takes seconds
    code = main()
    sys.stdout.flush()
    os._exit(code)  # vLLM's own shutdown takes seconds, and nothing is left to save
