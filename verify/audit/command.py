"""The command line of an audit: its arguments, its words, its exit codes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from runspec.core.hashing import is_digest
from verify.audit.replay import audit
from verify.one_shot import run_once, say

CLEAN, FINDINGS = 0, 1


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `audit` to the commands of `python -m verify`."""
    parser = commands.add_parser("audit", help="replay a run's ledger; exit 0 clean, 1 findings")
    parser.add_argument("run_dir", type=Path, help="run directory, at work or a copy")
    parser.add_argument(
        "--root-key",
        type=public_key,
        metavar="HEX",
        help="the root's public key; else the spec's, else the run's own throw-away root",
    )
    parser.add_argument(
        "--head",
        type=_head,
        action="append",
        default=[],
        metavar="ROWS:CHAIN",
        help="a head that an earlier audit printed, which must still be there; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
    parser.set_defaults(body=lambda options: run_once(lambda: _audit(options)))


def _audit(options: argparse.Namespace) -> int:
    report = audit(options.run_dir, root_key=options.root_key, heads=dict(options.head))
    lines = [json.dumps(report.as_json(), sort_keys=True)] if options.json else report.lines()
    say("\n".join(lines))
    return FINDINGS if report.findings else CLEAN


def public_key(text: str) -> str:
    """A key on a command line."""
    if not is_digest(text):
        raise argparse.ArgumentTypeError("64 hex characters are needed")
    return text


def _head(text: str) -> tuple[int, str]:
    rows, _, chain = text.partition(":")
    if not (rows.isascii() and rows.isdigit() and is_digest(chain)):
        raise argparse.ArgumentTypeError("ROWS:CHAIN is needed, as an audit prints it")
    return int(rows), chain
