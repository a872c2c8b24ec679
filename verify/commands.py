"""Commands `audit`, `findings` and `table` of `python -m verify`; their exit codes and printing."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from runspec.core.address import is_server_url, parse_join_link
from runspec.core.canonical import is_digest
from runspec.core.errors import UserError, reported
from runspec.core.files import atomic_file, read_bounded
from runspec.core.http_client import NoAnswer, fetch_now
from runspec.core.process import EXIT_INTERNAL
from runspec.core.signed import BadSignature
from verify import PERSON_S
from verify.audit import audit
from verify.audit.replay import replay
from verify.formats import findings, submission, verdict
from verify.formats.tables import DTYPES, Column, MalformedTable, Schema
from verify.plugins import replay_link

UNREADABLE, INTERRUPTED, NOBODY_READS = 2, 130, 141
"""Exit codes: a UserError; SIGINT and SIGPIPE, as a shell reports them."""


def run_once(body: Callable[[], int]) -> int:
    """Run a command whose exit code is a verdict; errors have other exit codes.

    Returns:
        The body's code; 2 on a UserError, 3 on an internal error, 130 on Ctrl-C, 141 if the
        reader of the output has closed it.
    """
    try:
        return body()
    except UserError as error:
        print(error, file=sys.stderr)
        return UNREADABLE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return NOBODY_READS
    except Exception:
        logging.getLogger("verify").exception("internal error")
        return EXIT_INTERNAL


def say(text: str) -> None:
    """Print a whole text and the end of a line.

    Raises:
        UserError: standard output cannot be written, for example because the disk is full.
        BrokenPipeError: the reader of the output has closed it.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        # Otherwise Python reports the error again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise UserError(
            f"cannot be written: {error.strerror or error}",
            place="standard output",
            remedy="write to a disk with room, or to a command that reads all",
        ) from error


CLEAN, FINDINGS = 0, 1


def add_audit_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `audit` to the commands of `python -m verify`."""
    parser = commands.add_parser("audit", help="replay a run's ledger; exit 0 clean, 1 findings")
    parser.add_argument(
        "run", metavar="RUN|LINK", help="run directory, of a live run or a copy; or a run's link"
    )
    parser.add_argument(
        "--root-key",
        type=public_key,
        metavar="HEX",
        help="the root's public key; default: the spec's, or the run's own throw-away root",
    )
    parser.add_argument(
        "--head",
        type=_head,
        action="append",
        default=[],
        metavar="ROWS:CHAIN",
        help="a head that an earlier audit printed and the ledger must still have; may be repeated",
    )
    parser.add_argument(
        "--replay",
        metavar="STEP|A-B|sample:K",
        help="then train these steps again, between full states that the run kept",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(body=lambda options: run_once(lambda: _audit(options)))


def _audit(options: argparse.Namespace) -> int:
    if "://" in options.run:
        return _audit_link(options)
    run_dir = Path(options.run)
    report = audit(run_dir, root_key=options.root_key, heads=dict(options.head))
    lines = [json.dumps(asdict(report), sort_keys=True)] if options.json else report.lines()
    say("\n".join(lines))
    refuted = 0
    if options.replay is not None:  # one object on standard output stays one
        out = sys.stderr if options.json else sys.stdout
        refuted = replay(run_dir, options.replay, out)
    return FINDINGS if report.findings or refuted else CLEAN


def _audit_link(options: argparse.Namespace) -> int:
    link = parse_join_link(options.run)
    if options.replay is None or options.json or options.head:
        raise UserError(
            "a link leads to full states, not to the ledger",
            place=link.coordinator,
            remedy="give --replay alone, or audit a copy of the run directory",
        )
    whole = replace(link, root=link.root or options.root_key)
    return CLEAN if replay_link(whole, options.replay, say) else FINDINGS


def add_findings_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `findings` to the commands of `python -m verify`."""
    parser = commands.add_parser("findings", help="read what watchers found; exit 1: a refutation")
    parser.add_argument(
        "places", nargs="+", metavar="FILE|URL", help="of `runspec watch`; or who serves a list"
    )
    parser.add_argument(
        "--trust",
        type=public_key,
        action="append",
        default=[],
        metavar="HEX",
        help="a watcher's key whose findings you believe; may be repeated",
    )
    parser.set_defaults(body=lambda options: run_once(lambda: _findings(options)))


def _findings(options: argparse.Namespace) -> int:
    code, found = CLEAN, [each for place in options.places for each in _found_at(place)]
    for finding, key in found:
        word = "checked" if key in options.trust else "reported"
        line = "".join(c if c.isprintable() else "?" for c in finding.line)
        say(f"{word} by {key[:16]}: run {finding.run[:64]!r}, {finding.outcome}: {line}")
        if word == "checked" and finding.outcome == "refuted":
            code = FINDINGS
    say(findings.weigh(found, options.trust))
    return code


def _found_at(place: str) -> list[findings.Signed]:
    with reported(
        "no finding",
        place,
        "name what `runspec watch` wrote or serves",
        OSError,
        BadSignature,
        NoAnswer,
    ):
        if not is_server_url(place):
            return [findings.open_finding(read_bounded(Path(place), findings.MAX_BYTES))]
        url, most = place.rstrip("/") + findings.LIST_PATH, findings.MAX_LIST_BYTES
        return findings.open_list(fetch_now("GET", url, max_bytes=most, timeout_s=PERSON_S).content)


def public_key(text: str) -> str:
    """Parse a public key of a command line: 64 hex characters."""
    if not is_digest(text):
        raise argparse.ArgumentTypeError("64 hex characters are needed")
    return text


def _head(text: str) -> tuple[int, str]:
    rows, _, chain = text.partition(":")
    if not (rows.isascii() and rows.isdigit() and is_digest(chain)):
        raise argparse.ArgumentTypeError("ROWS:CHAIN is needed, as an audit prints it")
    return int(rows), chain


_MAX_BYTES = 2**31
_CHECKS = "checks."


def add_table_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `table` to the commands of `python -m verify`."""
    parser = commands.add_parser("table", help="write a submission or verdict file as Parquet")
    parser.add_argument("file", type=Path, metavar="FILE", help="file of rollouts/step_<s>/")
    parser.add_argument("-o", dest="out", type=Path, required=True, metavar="FILE.parquet")
    parser.set_defaults(body=lambda options: run_once(lambda: _convert(options.file, options.out)))


def _convert(path: Path, out: Path) -> int:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError("needs pyarrow", place="table", remedy="pip install pyarrow") from error
    try:
        data = read_bounded(path, _MAX_BYTES)
        if ".verdict." in path.name:
            table = _verdicts(data)
        else:
            rows = submission.decode_rollouts(data, max_rows=len(data), max_bytes=_MAX_BYTES)
            table = _table(rows, submission.SCHEMA)
    except (OSError, MalformedTable) as error:
        raise UserError(
            f"neither a submission nor a verdict file: {error}",
            place=str(path),
            remedy="name a file `<digest>.safetensors` or `<digest>.verdict.safetensors` of a run",
        ) from error
    with atomic_file(out) as file:
        pq.write_table(table, file, compression="zstd")
    say(f"{out}: {len(table)} rows")
    return 0


def _verdicts(data: bytes) -> Any:
    """Return the table of verdicts, with the checks of a row as a list of structures."""
    import pyarrow as pa

    rows = verdict.decode_verdicts(data)
    parts = [c for c in verdict.SCHEMA.columns if c.name.startswith(_CHECKS)]
    kind = pa.list_(pa.struct([(c.name.removeprefix(_CHECKS), _value_type(c)) for c in parts]))
    checks = pa.array([[vars(check) for check in row.checks] for row in rows], type=kind)
    return _table(rows, verdict.SCHEMA).append_column("checks", checks)


def _table(rows: Sequence[Any], schema: Schema) -> Any:
    import pyarrow as pa

    arrays = {}
    for column in schema.columns:
        if not column.name.startswith(_CHECKS):
            value = _value_type(column)
            kind = pa.list_(value) if "offsets" in column.steps else value
            arrays[column.name] = pa.array([getattr(r, column.name) for r in rows], type=kind)
    return pa.table(arrays)


def _value_type(column: Column) -> Any:
    import pyarrow as pa

    if "text" in column.steps:
        return pa.string()
    return pa.binary() if column.width > 1 else pa.from_numpy_dtype(DTYPES[column.dtype])
