"""`python -m sampler grade` and `rewards`: grades a JSON Lines file of answers, lists plug-ins."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO, get_args

from runspec.core.entry_points import entry_points_of
from runspec.core.errors import UserError
from runspec.core.schema import Reward
from runspec.core.schema.source_files import ENVIRONMENT_GROUP, REWARD_GROUP
from sampler.tasks.graders import Graders
from sampler.tasks.interfaces import Answer, Result, completed, find_kind
from sampler.tasks.prompts import Thinking, answer_in
from verify.plugins import GraderFault, Problem

MAX_LINE_BYTES = 64 * 1024 * 1024
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 3600.0
LINES_AT_ONCE = 256
BAD_USAGE = 2
INTERRUPTED, NOBODY_READS = 130, 141
"""Exit codes that a shell has for SIGINT and SIGPIPE."""


def add_commands(commands: Any) -> None:
    """Add `grade` and `rewards` to what `add_subparsers` returned."""
    grade = commands.add_parser(
        "grade",
        help="grade a file of answers",
        description="Grades each line of a JSON Lines file: an object with task_type, completion, "
        "verification_info (an object, or one as a JSON string) and, if wanted, id and timeout "
        "(seconds). The text after the first </think> is graded, or what --thinking says. "
        "Exit code: 0 all lines were graded, 1 some are errors, 2 bad usage.",
    )
    grade.set_defaults(call=run)
    grade.add_argument("file", type=Path, metavar="FILE.jsonl", help="`-` reads standard input")
    grade.add_argument("--json", action="store_true", help="one JSON object a line")
    grade.add_argument(
        "--thinking",
        choices=get_args(Thinking),
        default="optional",
        help="as data.thinking of a run: what of a completion is graded (default: optional)",
    )
    rewards = commands.add_parser("rewards", help="list the plug-ins that grade")
    rewards.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Run `grade` or `rewards`; return the exit code."""
    try:
        if options.command == "rewards":
            return list_rewards(sys.stdout)
        if str(options.file) == "-":
            return _grade(
                read_lines(sys.stdin.buffer, options.thinking), sys.stdout, as_json=options.json
            )
        with options.file.open("rb") as file:
            return _grade(read_lines(file, options.thinking), sys.stdout, as_json=options.json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `head` has read what it wanted
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for what is left at the end
        return NOBODY_READS
    except OSError as error:
        print(f"{options.file}: {error.strerror}", file=sys.stderr)
    except UserError as error:
        print(error, file=sys.stderr)
    return BAD_USAGE


def list_rewards(out: TextIO) -> int:
    """Print every installed kind of reward with its properties."""
    rows = [("kind", "role", "runs in", "repeatable", "offered by")]
    groups = REWARD_GROUP, ENVIRONMENT_GROUP
    points = {point.name: point for group in groups for point in entry_points_of(group)}
    for name, point in sorted(points.items()):
        source = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
        try:
            kind = completed(point.load())
        except Exception as error:  # noqa: BLE001 - a package may break in any way at its import
            rows.append((name, "broken", f"{type(error).__name__}: {error}"[:80], "", source))
            continue
        where, repeatable = "the caller", True
        if kind.role == "task":
            where = "grader process" if kind.isolated else "sandbox of its own"
            repeatable = kind.repeatable
        elif kind.role == "environment":
            where, repeatable = "grader process", kind.determinism == "exact"
        rows.append((name, kind.role, where, "yes" if repeatable else "no", source))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip(), file=out, flush=True)
    return 0


def _grade(lines: Iterator[Line], out: TextIO, *, as_json: bool) -> int:
    errors = graded = 0
    known: dict[str, Graders] = {}  # of each kind in the file, made when it first occurs
    with ExitStack() as stack:
        while portion := list(islice(lines, LINES_AT_ONCE)):
            for line, result in zip(portion, _score(portion, known, stack), strict=True):
                errors += isinstance(result, GraderFault)
                graded += 1
                print(_shown(line, result, as_json=as_json), file=out, flush=True)
    if not as_json:
        print(f"{graded - errors} graded, {errors} errors", file=out)
    return 1 if errors else 0


def _score(lines: list[Line], known: dict[str, Graders], stack: ExitStack) -> list[Result]:
    """Grade a portion of lines; an error of a line or its kind is its result."""
    results: dict[int, Result] = {}
    alike: dict[tuple[str, float | None], list[tuple[int, Answer]]] = {}
    for line in lines:
        if line.answer is None:
            results[line.number] = GraderFault(line.error)
        else:
            key = (line.answer.problem.task_type, line.timeout_s)
            alike.setdefault(key, []).append((line.number, line.answer))
    for (kind, timeout), numbered in alike.items():
        numbers, answers = zip(*numbered, strict=True)
        try:
            if find_kind(kind).role != "task":
                raise UserError(f"task_type: kind {kind} grades lengths, not answers")
            if timeout is not None:
                with closing(_graders(kind, timeout)) as own:
                    scored = own.score(answers)
            else:
                if kind not in known:
                    known[kind] = stack.enter_context(closing(_graders(kind, None)))
                scored = known[kind].score(answers)
        except UserError as error:
            scored = [GraderFault(error.thing)] * len(answers)
        results.update(zip(numbers, scored, strict=True))
    return [results[line.number] for line in lines]


def _graders(kind: str, timeout: float | None) -> Graders:
    given = {} if timeout is None else {"timeout": f"{timeout:.3f}s"}
    return Graders([Reward.model_validate({"name": "grade", "kind": kind, **given})])


def _shown(line: Line, result: Result, *, as_json: bool) -> str:
    said = str(result) if isinstance(result, GraderFault) else result.reason
    said = said.removeprefix(f"line {line.number}: ")
    if as_json:
        about: dict[str, Any] = {"line": line.number}
        if line.identity is not None:
            about["id"] = line.identity
        if isinstance(result, GraderFault):
            return json.dumps({**about, "error": said})
        return json.dumps({**about, "reward": result.value, "reason": said})
    label = f"{line.number:>6}" + (f"  {line.identity}" if line.identity is not None else "")
    value = "error" if isinstance(result, GraderFault) else f"{result.value:.4g}"
    row = f"{label}  {value:<6} {' '.join(said.split())}".rstrip()
    # One line without control characters for the terminal.
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in row)


@dataclass(frozen=True)
class Line:
    """One line of a file: an answer, or an error."""

    number: int
    """Counted from 1, blank lines included."""
    answer: Answer | None
    error: str = ""
    identity: Any = None
    """Its `id`."""
    timeout_s: float | None = None


class BadLine(Exception):
    """Error of a line; names the field."""


def read_lines(file: BinaryIO, thinking: Thinking) -> Iterator[Line]:
    """Yield the lines of a file without blank ones; at most one is in memory."""
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES:
            while data and not data.endswith(b"\n"):
                data = file.readline(MAX_LINE_BYTES)
            yield Line(number, None, f"longer than {MAX_LINE_BYTES} bytes")
        elif data.strip():
            yield _line(number, data, thinking)


def _line(number: int, data: bytes, thinking: Thinking) -> Line:
    identity = None
    try:
        row = _object(data, "the line")
        identity, task_type = row.get("id"), _text(row, "task_type")
        info, timeout = row.get("verification_info"), row.get("timeout")
        if isinstance(info, str):
            info = _object(info.encode(errors="surrogatepass"), "verification_info")
        if not isinstance(info, dict):
            raise BadLine("verification_info: neither an object nor one as a JSON string")
        text = answer_in(_text(row, "completion"), thinking) or ""
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
                raise BadLine("timeout: not a number of seconds")
            if not MIN_TIMEOUT_S <= timeout <= MAX_TIMEOUT_S:
                limits = f"{MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g} s"
                raise BadLine(f"timeout: {timeout} is not in {limits}")
            timeout = float(timeout)
        answer = Answer(Problem(f"line {number}", task_type, "", info), text)
        return Line(number, answer, "", identity, timeout)
    except BadLine as error:
        return Line(number, None, str(error), identity)


def _text(row: dict[str, Any], field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        raise BadLine(f"{field}: {'missing' if value is None else 'not a text'}")
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"{what}: no JSON: {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise BadLine(f"{what}: no JSON object")
    return value
