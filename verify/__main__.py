"""Coordinator and validator; `python -m verify`: calibration, audits, single proofs, tables."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from runspec.core.process import Role, stop_event
from verify import calibration, proof_commands
from verify.commands import add_audit_command, add_findings_command, add_table_command


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run a command, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m verify", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    proof_commands.add_commands(commands)
    calibration.add_commands(commands)
    add_audit_command(commands)
    add_findings_command(commands)
    add_table_command(commands)
    options = parser.parse_args(arguments)
    code: int = options.body(options)
    return code


def coordinate(role: Role, log: logging.Logger) -> None:
    """Lease work, receive submissions and close steps, until told to end."""
    from verify.coordinator.run import serve

    host, port = role.address
    asyncio.run(
        serve(
            role.folder,
            host=host,
            port=port,
            weights=role.endpoints.origin,
            public_weights=role.endpoints.weights(),
            root_public_key=role.root_public_key,
        )
    )


def validate(role: Role, log: logging.Logger) -> None:
    """Check submissions until the run is finished."""
    stop = stop_event()
    from verify.validator import run  # after the signal handlers, because this takes seconds

    run(role, stop, log)


if __name__ == "__main__":
    sys.exit(main())
