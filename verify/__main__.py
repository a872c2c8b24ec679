"""`python -m verify`: coordinator, validator, calibration, audit, single proofs, tables."""

from __future__ import annotations

import argparse
import logging
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from runspec.core.address import parse_address
from runspec.core.process import run_role, stop_event
from verify import proof_commands
from verify.calibration import command as calibration
from verify.commands import add_audit_command, add_table_command, public_key


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run a role or command, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m verify", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    coordinator = commands.add_parser(
        "coordinator", help="lease work, receive submissions, close steps"
    )
    coordinator.add_argument("run_dir", type=Path, help="run directory with spec.json and keys/")
    coordinator.add_argument("--listen", required=True, metavar="HOST:PORT")
    coordinator.add_argument("--weights", required=True, metavar="URL", help="origin or relay")
    coordinator.add_argument(
        "--public-weights",
        action="append",
        default=[],
        metavar="URL",
        help="relay or origin for volunteers; may be repeated",
    )
    validator = commands.add_parser("validator", help="check submissions until the run is finished")
    validator.add_argument("--run", required=True, help="the run's name")
    validator.add_argument("--coordinator", required=True, metavar="URL")
    validator.add_argument(
        "--weights", required=True, action="append", metavar="URL", help="relay; may be repeated"
    )
    validator.add_argument("--key", required=True, type=Path, metavar="FILE")
    validator.add_argument("--dir", required=True, type=Path, help="folder of fetched versions")
    validator.add_argument("--metrics", metavar="HOST:PORT", help="serves Prometheus metrics there")
    for command in (coordinator, validator):
        command.add_argument(
            "--public-key",
            required=True,
            type=public_key,
            metavar="HEX",
            help="the root key",
        )
    coordinator.set_defaults(body=partial(_run, _coordinator))
    validator.set_defaults(body=partial(_run, _validator))
    proof_commands.add_commands(commands)
    calibration.add_commands(commands)
    add_audit_command(commands)
    add_table_command(commands)
    options = parser.parse_args(arguments)
    code: int = options.body(options)
    return code


def _run(body: Callable[[Namespace, logging.Logger], None], options: Namespace) -> int:
    return run_role(options.command, lambda log: body(options, log))


def _coordinator(options: Namespace, log: logging.Logger) -> None:
    import asyncio

    from verify.coordinator.run import serve

    host, port = parse_address(options.listen)
    asyncio.run(
        serve(
            options.run_dir,
            host=host,
            port=port,
            weights=options.weights,
            public_weights=options.public_weights,
            root_public_key=options.public_key,
        )
    )


def _validator(options: Namespace, log: logging.Logger) -> None:
    stop = stop_event()
    from verify.validator import run  # after the signal handlers, because this takes seconds

    run(options, stop, log)


if __name__ == "__main__":
    sys.exit(main())
