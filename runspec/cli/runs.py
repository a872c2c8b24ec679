"""Commands on a run: what it says, when a condition of it holds, pause, resume, export, delete."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from runspec import cli
from runspec.cli import reader_gone
from runspec.core.errors import BadUsage, UserError, reported
from runspec.core.files import Folder
from runspec.core.process import run_role, stop_event
from runspec.core.run_files import checkpoints_folder
from runspec.core.schema import RunSpec
from runspec.core.schema.load import load_resolved
from runspec.local.backend import end_leftovers
from runspec.local.diagnosis import evaluation_names, main_figure, result_line
from runspec.local.model_folders import export_version
from runspec.local.planning import make_plan
from runspec.local.run_dir import find_run, hold, holder, run_directory
from runspec.local.run_view import TYPES, RunView, look_at
from runspec.local.state import RunState
from runspec.local.supervisor import PAUSE, send_request

POLL_S = 0.25
_BLOCK = 1 << 16


def logs_command(
    run: cli.Run,
    role: Annotated[str | None, typer.Option("--role", help="One role's log only.")] = None,
    follow: cli.Follow = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="Only so many last lines of each.")
    ] = None,
    runs_dir: cli.RunsDir = cli.RUNS,
) -> int:
    """Prints logs (their last `tail` lines), with `follow` until Ctrl-C; returns the exit code."""
    folder = find_run(run, runs_dir) / "logs"
    paths = _paths(folder, role)
    read = {} if tail is None else {path: _tail_start(path, tail) for path in paths}
    try:
        while True:
            for path in _paths(folder, role):
                read[path] = _print_new(path, read.get(path, 0), role is None, follow)
            if not follow or reader_gone():
                return 0
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return 0


def _paths(folder: Path, role: str | None) -> list[Path]:
    """Return the logs of all roles, or that of one."""
    paths = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if role is not None and role not in paths:
        raise UserError(
            f"no log of role {role!r}",
            place=str(folder),
            remedy=f"one of: {', '.join(paths)}" if paths else "the run has not started yet",
        )
    return list(paths.values()) if role is None else [paths[role]]


def _tail_start(path: Path, lines: int) -> int:
    """Where the last lines of a file begin."""
    with path.open("rb") as file:
        end = start = file.seek(0, 2)
        while start > 0:
            start = max(0, start - _BLOCK)
            file.seek(start)
            data = file.read(end - start)
            if data.rstrip(b"\n").count(b"\n") >= lines:
                kept = data.splitlines(keepends=True)[-lines:] if lines else []
                return end - sum(map(len, kept))
    return 0


def _print_new(path: Path, read: int, several: bool, follow: bool) -> int:
    """Prints what a log has gained, with the role's name before each line where there are several.

    Args:
        path: the log.
        read: bytes of it that are printed already.
        several: whether other logs are printed beside it.
        follow: whether it is printed again later.

    Returns:
        Bytes of it that are printed now.
    """
    prefix = f"{path.stem:>14} | ".encode() if several else b""
    with path.open("rb") as file:
        file.seek(read)
        for line in file:
            whole = line.endswith(b"\n")
            if several and follow and not whole:
                break  # still being written; printed whole the next time
            sys.stdout.buffer.write(prefix + line + (b"" if whole or not several else b"\n"))
            read += len(line)
    sys.stdout.flush()
    return read


def events_command(
    run: cli.Run,
    follow: cli.Follow = False,
    as_json: cli.Json = False,
    runs_dir: cli.RunsDir = cli.RUNS,
) -> int:
    """Prints events until their end, or with `follow` until Ctrl-C; returns the exit code."""
    run_dir = find_run(run, runs_dir)
    with closing(RunState(run_dir)) as state:
        try:
            last = 0
            while True:
                new = state.events(after=last)
                for event in new:
                    print(json.dumps(asdict(event)) if as_json else event, flush=True)
                if not follow or reader_gone():
                    return 0
                last = new[-1].id if new else last
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            return 0


EXIT_HOLDS, EXIT_NOT = 0, 1
_COUNTED = re.compile(r"(step|version)=(\d{1,9})")
_EVALUATION = re.compile(
    r"evaluation:([a-z0-9][a-z0-9_-]*)(?:\.([a-z0-9-]+))?(>|<)(-?\d+(?:\.\d+)?)"
)
_CONDITION = re.compile(r"(?:condition=)?([A-Za-z]+)(?:=(true|false))?", re.IGNORECASE)


def wait_command(
    run: cli.Run,
    condition: Annotated[
        str, typer.Option("--for", help="A condition: Ready, Finished, ..., or step=N.")
    ],
    timeout: Annotated[
        float,
        typer.Option(
            parser=cli.duration, metavar="TIME", help="How long, like 30s.", show_default="10m"
        ),
    ] = 600.0,
    runs_dir: cli.RunsDir = cli.RUNS,
) -> int:
    """Waits; returns 0 when it holds, 1 when it cannot or has not in time.

    Raises:
        UserError: there is no such run or condition.
    """
    wanted = parse_awaited(condition)
    run_dir = find_run(run, runs_dir)
    deadline = time.monotonic() + timeout
    while True:
        seen = look_at(run_dir, ledger=wanted.needs_ledger)
        if (why := wanted.holds(seen)) is not None:
            print(f"{seen.spec.name}: {wanted.text}{f' ({why})' if why else ''}")
            return EXIT_HOLDS
        reason = why_never(wanted, seen)
        if reason is None and time.monotonic() >= deadline:
            reason = f"not within {timeout:g} s"
        if reason is not None:
            print(f"error: waited for {wanted.text}: {reason}", file=sys.stderr)
            published = "none" if seen.published is None else str(seen.published)
            roles = ", ".join(f"{r.name} {r.state}" for r in seen.roles if r.state != "running")
            print(
                f"  last seen: {seen.spec.name} is {seen.state}, {seen.trained} of "
                f"{seen.spec.steps} steps trained, version published: {published}"
                f"{f', not running: {roles}' if roles else ''}",
                file=sys.stderr,
            )
            return EXIT_NOT
        time.sleep(POLL_S)


@dataclass(frozen=True)
class Awaited:
    """What is waited for."""

    text: str
    holds: Callable[[RunView], str | None]
    """Return why it holds now, empty for steps and versions; None while it does not."""
    number: int = 0
    """Steps or versions that it needs."""
    evaluation: str = ""
    """The evaluation whose figure is awaited."""
    needs_ledger: bool = False


def parse_awaited(text: str) -> Awaited:
    """Reads Finished, condition=Ready, Ready=false, step=20, version=3 or evaluation:heldout>0.6.

    An evaluation may name its figure, `evaluation:heldout.pass-4>0.8`; without one it is `mean`, or
    `loss` in a run that trains on documents.

    Raises:
        BadUsage: none of these.
    """
    if counted := _COUNTED.fullmatch(text):
        kind, number = counted[1], int(counted[2])

        def reached(seen: RunView) -> str | None:
            at = seen.trained if kind == "step" else seen.published
            return "" if at is not None and at >= number else None

        return Awaited(f"{kind}={number}", reached, number)
    if found := _EVALUATION.fullmatch(text):
        name, figure, sign, limit = *found.groups()[:3], float(found[4])

        def beyond(seen: RunView) -> str | None:
            for result in seen.results:
                known = result.figures.get(figure or main_figure(result))
                if result.evaluation != name or known is None:
                    continue
                if known.value > limit if sign == ">" else known.value < limit:
                    return result_line(result)
            return None

        words = f"evaluation:{name}{f'.{figure}' if figure else ''}{sign}{limit:g}"
        return Awaited(words, beyond, evaluation=name)
    named = _CONDITION.fullmatch(text)
    by_name = {type_.lower(): type_ for type_ in TYPES}
    if named and named[1].lower() in by_name:
        type_, status = by_name[named[1].lower()], (named[2] or "true").capitalize()

        def judged(seen: RunView) -> str | None:
            condition = seen.conditions[type_]
            return condition.message if condition.status == status else None

        words = type_ if status == "True" else f"{type_}={status}"
        return Awaited(words, judged, needs_ledger=type_ in ("SetAside", "GraderFaults"))
    close = get_close_matches(named[1].lower(), by_name) if named else []
    hint = f"; did you mean {by_name[close[0]]}?" if close else ""
    raise BadUsage(
        f"nothing that can be waited for: {text!r}{hint}",
        place="--for",
        remedy=f"one of {', '.join(TYPES)} (with =false: until it does not), step=N, version=N, "
        "evaluation:NAME>X, evaluation:NAME.FIGURE<X",
    )


def why_never(awaited: Awaited, seen: RunView) -> str | None:
    """Return why the run cannot reach it by itself; None while it can."""
    if awaited.evaluation and awaited.evaluation not in evaluation_names(seen.spec):
        return f"the run has no evaluation {awaited.evaluation!r}"
    if awaited.number > seen.spec.steps:
        return f"the run has {seen.spec.steps} steps"
    if not seen.alive and seen.state in ("finished", "failed"):
        reason = f" ({seen.reason})" if seen.reason else ""
        return f"the run is {seen.state}{reason}"
    return None


RELEASE_TIMEOUT_S = 60.0
_POLL_S = 0.1


def pause_command(run: cli.Run, runs_dir: cli.RunsDir = cli.RUNS) -> int:
    """Pause the run; return 0 once no process of it is alive, also where none was."""
    run_dir = find_run(run, runs_dir)
    if holder(run_dir) is None:
        print(f"{run_dir.name} is not alive: {look_at(run_dir, ledger=False).state}")
        return 0
    send_request(run_dir, PAUSE, {}, say=lambda text: print(f"The supervisor {text}"))
    # The supervisor, whose roles have ended, writes the summary.
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    while (held_by := holder(run_dir)) is not None:
        if time.monotonic() >= deadline:
            raise UserError(
                f"every role has ended, but the run is still held by {held_by}",
                place=str(run_dir),
                remedy=f"see {run_dir / 'logs'}, or end that process",
            )
        time.sleep(_POLL_S)
    print(
        f"{run_dir.name} is paused. To go on from the newest checkpoint: runspec resume {run_dir}"
    )
    return 0


def export_command(
    run: Annotated[str, typer.Argument(help="NAME, or NAME@VERSION; else the newest.")],
    directory: Annotated[Path, typer.Argument(help="A new folder.")],
    runs_dir: cli.RunsDir = cli.RUNS,
) -> int:
    """Export a version of the run that `run` names as NAME or NAME@VERSION; return 0."""
    run_dir, spec, version = run_and_version(run, runs_dir)
    exported = export_version(run_dir, spec, version, directory)
    print(
        f"version {exported} of {spec.name} is in {directory}; its README.md says how to check it"
    )
    return 0


def run_and_version(text: str, runs_dir: Path) -> tuple[Path, RunSpec, int | None]:
    """Return directory, resolved spec and version of NAME or NAME@VERSION; None is the newest.

    Raises:
        BadUsage: the version is no number.
        UserError: there is no such run.
    """
    name, at, version = text.partition("@")
    if at and not version.isdecimal():
        raise BadUsage(f"no version: {version!r}", place=text, remedy="name one as NAME@12")
    run_dir = find_run(name, runs_dir)
    return run_dir, load_resolved(run_dir), int(version) if at else None


def resume_command(
    run: cli.Run, detach: cli.Detach = False, runs_dir: cli.RunsDir = cli.RUNS
) -> int:
    """Goes on from the newest checkpoint; returns the exit code, as `apply` does."""
    from runspec.cli.apply import carry_out  # the other commands start faster without it

    run_dir = find_run(run, runs_dir)
    spec = load_resolved(run_dir)
    home = run_directory(spec, run_dir.parent)
    if home.resolve() != run_dir.resolve():
        raise UserError(
            f"by its spec this run is called {spec.name}",
            place=str(run_dir),
            remedy=f"rename the directory to {home}",
        )
    return carry_out(make_plan(spec, run_dir), detach=detach)


def rollback_command(
    run: cli.Run,
    to: Annotated[int, typer.Option("--to", min=0, help="The policy version to go back to.")],
    yes: cli.Yes = False,
    runs_dir: cli.RunsDir = cli.RUNS,
) -> int:
    """Takes the run back; returns 0.

    Raises:
        RunLocked: the run is alive.
    """
    from runspec.local.prepare import complete_rollback, roll_back  # they import numpy

    run_dir = find_run(run, runs_dir)
    with hold(run_dir):
        with closing(RunState(run_dir)) as state:
            end_leftovers(state.roles())
        unfinished = complete_rollback(run_dir)
        if unfinished is not None:
            print(f"Completed a rollback to version {unfinished} that was cut short")
        seen = look_at(run_dir, ledger=False)
        if seen.trained == to:
            print(f"{seen.spec.name} is at version {to}: there is nothing after it")
            return 0
        if not yes:
            steps = max(0, seen.trained - to)
            question = (
                f"Take {seen.spec.name} back to version {to}, and remove the {steps} steps after "
                "it with their checkpoints, weights and rollouts, and all keys?"
            )
            typer.confirm(question, abort=True)
        roll_back(run_dir, to)
    print(f"{run_dir.name} is back at version {to}. To go on: runspec resume {run_dir}")
    return 0


def delete_command(run: cli.Run, yes: cli.Yes = False, runs_dir: cli.RunsDir = cli.RUNS) -> int:
    """Removes the directory; returns 0.

    Raises:
        RunLocked: the run is alive.
    """
    run_dir = find_run(run, runs_dir)
    with hold(run_dir):
        kept: Folder | None = None
        try:
            spec = load_resolved(run_dir)
            if spec.checkpoints.dir is not None:
                kept = checkpoints_folder(run_dir, spec)
        except UserError as error:
            print(f"warning: full states outside the run are not known: {error}", file=sys.stderr)
        if not yes:
            typer.confirm(f"Remove {run_dir} with everything in it?", abort=True)
        try:
            with closing(RunState(run_dir)) as state:
                end_leftovers(state.roles())
        except UserError as error:  # damaged: that must not keep it from being removed
            print(f"warning: roles that may still be alive are not known: {error}", file=sys.stderr)
        # Renamed first: a removal cut short leaves nothing that looks like a run.
        doomed = run_dir.with_name(f".tmp-deleted-{run_dir.name}")
        remedy = f"mend the permissions, then remove {run_dir} and {doomed}"
        with reported("cannot be removed", run_dir, remedy, OSError):
            if doomed.exists():
                shutil.rmtree(doomed)
            run_dir.rename(doomed)
            shutil.rmtree(doomed)
    print(f"Removed {run_dir}")
    if kept is not None and not (isinstance(kept, Path) and not kept.exists()):
        print(f"Its full states stay in {kept}: a new run of this name needs them gone")
    return 0


def monitor_command(
    run: cli.Run,
    name: Annotated[str, typer.Argument(help="One of the spec's monitors.")],
    runs_dir: cli.RunsDir = cli.RUNS,
) -> int:
    """Follows a run while it is alive, or sends what is there; returns the exit code of a role.

    Raises:
        UserError: there is no such run, or its spec has no such monitor.
    """
    from runspec.local.monitors.follow import follow  # the other commands start faster without it

    run_dir = find_run(run, runs_dir)
    spec = load_resolved(run_dir)
    setting = next((each for each in spec.monitors if each.name == name), None)
    if setting is None:
        there = ", ".join(each.name for each in spec.monitors)
        raise UserError(
            f"no monitor {name!r}",
            place=f"monitors of {spec.name}",
            remedy=f"one of: {there}" if there else "add it to the spec, then apply again",
        )
    return run_role(
        f"monitor-{name}", lambda log: follow(run_dir, spec, setting, stop_event(), log)
    )
