"""`runspec apply`: starts, changes or continues a run, or prints why it cannot."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runspec import cli
from runspec.cli import exit_code_of
from runspec.cli.checks import sound_spec
from runspec.cli.status import left_text, role_table, show_link, step_line
from runspec.core.errors import (
    UserError,
    duration,
    number,
    per_second,
    remedies_once,
    share,
    sparkline,
)
from runspec.core.files import FULL
from runspec.core.schema.load import MAX_BYTES, SpecFiles, load_resolved, parse_resolved
from runspec.local import metrics, planning
from runspec.local.apply import REPORT_FILE, SUMMARY_FILE, supervise
from runspec.local.backend import EXIT_INTERRUPTED, LOCAL, StopSignals, backend, last_lines
from runspec.local.diagnosis import unsolved_text
from runspec.local.machine import this_machine
from runspec.local.metrics import Row, end_figures, island_figures, island_pairs, read_rows
from runspec.local.model_folders import trained_model
from runspec.local.planning import RunPlan
from runspec.local.prepare import NotReady, prepare_run, require_ready
from runspec.local.processes import PreparedRun
from runspec.local.run_dir import RUNS, RunLocked, run_directory, sign_lock
from runspec.local.state import RoleRow, RunState
from runspec.local.supervisor import CHANGE, change_request, send_request
from runspec.plan import BadPlan, SavedPlan, read_plan

EXIT_FAILED = 1
LAPTOP = "laptop"
SUPERVISOR_LOG = "supervisor.log"
START_TIMEOUT_S = 600.0
_LINES = 20
_POLL_S = 0.2


def apply_command(
    file: Annotated[Path, typer.Argument(help="The spec, or a plan that `plan -o` saved.")],
    profile: cli.Profile = None,
    placement: cli.Placement = None,
    overrides: cli.Overrides = None,
    detach: cli.Detach = False,
    runs_dir: cli.SpecRunsDir = None,
    resolved: Annotated[bool, typer.Option("--resolved", hidden=True)] = False,
) -> int:
    """Starts, changes or continues the run; returns the exit code.

    With `resolved` the spec comes from standard input: a backend carries it to the machine that has
    the run directory.
    """
    if resolved:
        spec = parse_resolved(sys.stdin.buffer.read(MAX_BYTES + 1), place="standard input")
        plan = planning.make_plan(spec, run_directory(spec, runs_dir))
        return carry_out_or_explain(plan, detach=detach)
    files = cli.files_named(file, profile, placement, overrides)
    saved = saved_plan(files)
    spec, approved = (saved.spec, saved.seen) if saved else (sound_spec(files), None)
    if spec.placement.backend != LOCAL:
        return backend(spec.placement.backend).apply(spec, detach, runs_dir)
    plan = planning.make_plan(spec, run_directory(spec, runs_dir), approved)
    return carry_out_or_explain(plan, detach=detach, files=None if saved else files)


def carry_out_or_explain(plan: RunPlan, *, detach: bool, files: SpecFiles | None = None) -> int:
    """`carry_out`; where this machine cannot start the run, prints what it lacks and returns 1.

    Args:
        plan, detach: as `carry_out` takes them.
        files: the spec's, to name what would start here instead; None: nothing is named.
    """
    try:
        return carry_out(plan, detach=detach)
    except NotReady as error:
        show_missing(error, files)
        return EXIT_FAILED


def carry_out(plan: RunPlan, *, detach: bool) -> int:
    """Starts or continues a run, or changes it while it is alive; returns the exit code.

    Args:
        plan: what the run is to be.
        detach: leaves the supervisor in the background.

    Raises:
        NotReady: this machine cannot start it.
    """
    planning.refuse_stale(plan)
    spec, run_dir = plan.spec, plan.run_dir
    anew = not plan.new and planning.starts_anew(plan.changes, run_dir)
    if plan.finished:
        print(f"{spec.name} is finished: all {spec.steps} steps are trained.")
        for change in plan.changes:
            print(f"not applied, for nothing is left to do: {change}")
        show_result(run_dir)
        return 0
    plan = planning.with_problems(plan, this_machine(), print)
    try:
        with prepare_run(plan) as run:
            if anew:
                print(planning.STARTS_ANEW)
            show_link(run_dir, spec)
            if detach:
                return start_in_background(run)
            with StopSignals() as requests, watching(spec.name, spec.steps) as view:
                outcome = supervise(run, view, requests)
    except RunLocked as error:
        return _change_live(plan, error)
    show_result(run_dir)
    if outcome.kind == "finished":
        return 0
    how = f"Interrupted by {requests.last}" if outcome.kind == "interrupted" else "Paused"
    print(f"{how}. To go on from the newest checkpoint: runspec resume {run_dir}")
    return EXIT_INTERRUPTED if outcome.kind == "interrupted" else 0


def saved_plan(files: SpecFiles) -> SavedPlan | None:
    """The plan that a file holds; None where it holds something else.

    Raises:
        BadPlan: it is damaged, or comes with options that a plan does not take.
    """
    try:
        plan = read_plan(files.path)
    except BadPlan:
        raise
    except (OSError, UserError):
        return None  # no file, or larger than any plan: whoever reads specs says it better
    if plan is not None and (files.profile or files.placement or files.overrides):
        raise BadPlan(
            "a plan is applied as it is: --profile, --placement and --set are for specs",
            place=str(files.path),
            remedy="plan again with them",
        )
    return plan


def _change_live(plan: RunPlan, held: RunLocked) -> int:
    """Hands changes to the supervisor of a run that is alive; returns the exit code.

    Raises:
        RunLocked: there are none.
        RequestRefused: the supervisor refuses them, for one that needs the run stopped, say.
    """
    run_dir = plan.run_dir
    if plan.new or not plan.changes:  # where nothing is there yet, someone else is just making it
        raise held
    require_ready(plan)
    for change in plan.changes:
        print(f"{change.change_class:<8} {change}")
    payload = change_request(plan.spec, plan.seen.serial)
    answer = send_request(
        run_dir, CHANGE, payload, say=lambda text: print(f"The supervisor {text}")
    )
    print(f"{plan.spec.name}: {answer} (serial {planning.seen_now(run_dir).serial})")
    return 0


def show_result(run_dir: Path) -> None:
    """The first and last figures of a run, and where to look further."""
    path = run_dir / SUMMARY_FILE
    if not path.exists():
        print(f"No step has been trained yet; logs are in {run_dir / 'logs'}")
        return
    summary: dict[str, Any] = json.loads(path.read_bytes())
    table = Table(title=f"{summary['steps']} steps in {duration(summary['wall_s'])}")
    table.add_column("mean of ten steps")
    table.add_column("first", justify="right")
    table.add_column("last", justify="right")
    for label, first, last in end_figures(summary):
        table.add_row(label, number(first), number(last))
    Console().print(table)
    newest = read_rows(run_dir)[-1:]
    if newest and (unsolved := unsolved_text(newest[0])):
        print(unsolved)
    lines = trained_model(run_dir, load_resolved(run_dir))
    for line in lines:
        print(f"Trained model: {line}" if line.startswith("version") else f"  {line}")
    print(f"Report: {run_dir / REPORT_FILE}   logs: {run_dir / 'logs'}")
    if lines:
        run = run_dir.name if run_dir == (RUNS / run_dir.name).absolute() else str(run_dir)
        print(f"Talk to it: {shlex.join(['runspec', 'chat', run])}")
        print(f"Export it: {shlex.join(['runspec', 'export', run, f'{run_dir.name}-model'])}")


def show_missing(error: NotReady, files: SpecFiles | None) -> None:
    """Print what this machine lacks, and what to do; with files also what would start here."""
    console = Console(stderr=True)
    console.print(Text(f"{error.name} cannot start on this machine. Missing:", style="bold"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    remedies = remedies_once([item.remedy for item in error.lacking])
    for item, words in zip(error.lacking, remedies, strict=True):
        remedy = f"\n{words}" if words else ""
        table.add_row(Text(item.path, style="cyan"), Text(item.thing) + Text(remedy, style="dim"))
    console.print(table)
    if files is None or files.profile is not None:
        return
    laptop = files.path.parent / "profiles" / f"{LAPTOP}.yaml"
    if laptop.exists():
        command = shlex.join(["runspec", "apply", str(files.path), "--profile", LAPTOP])
        console.print(f"The same loop, small enough for this machine: {command}", soft_wrap=True)


LINE_EVERY_S = 5.0
FRAME_EVERY_S = 0.5
_EVENTS_SHOWN = 4


class PlainView:
    """A line for each change of a role, and one on the run every few seconds."""

    def __init__(self, steps: int, out: TextIO) -> None:
        self._steps = steps
        self._out = out
        self._said_at = 0.0
        self._said = ""

    def event(self, role: str, text: str, kind: str = "note") -> None:
        self._print(f"{role}: {text}")

    def show(self, rows: Sequence[Row], roles: Sequence[RoleRow], note: str) -> None:
        line = step_line(rows, self._steps) if rows else note
        now = time.monotonic()
        last = bool(rows) and rows[-1]["step"] + 1 >= self._steps
        if line and line != self._said and (last or now - self._said_at >= LINE_EVERY_S):
            self._said, self._said_at = line, now
            self._print(line)

    def _print(self, line: str) -> None:
        try:
            print(f"{time.strftime('%H:%M:%S')} {line}", file=self._out, flush=True)
        except OSError as error:
            if error.errno not in FULL:  # a full disk: written with the next line that can be
                raise


class LiveView:
    """A panel that is drawn anew twice a second."""

    def __init__(self, name: str, steps: int, live: Live) -> None:
        self._name, self._steps, self._live = name, steps, live
        self._events: deque[str] = deque(maxlen=_EVENTS_SHOWN)
        self._evaluation = ""
        self._drawn_at = 0.0

    def event(self, role: str, text: str, kind: str = "note") -> None:
        self._events.append(f"{time.strftime('%H:%M:%S')} {role}: {text}")
        self._drawn_at = 0.0
        if kind == "result":
            self._evaluation = text

    def show(self, rows: Sequence[Row], roles: Sequence[RoleRow], note: str) -> None:
        now = time.monotonic()
        if now - self._drawn_at < FRAME_EVERY_S:
            return
        self._drawn_at = now
        parts: list[RenderableType] = [
            Text(f"{self._name}  {note}", style="bold", overflow="ellipsis", no_wrap=True),
            _run_table(rows, self._steps, self._live.console.width),
            *([Text(self._evaluation)] if self._evaluation else ()),
            role_table(roles),
            Text("\n".join(self._events), style="bright_black"),
        ]
        self._live.update(Group(*parts), refresh=True)


@contextmanager
def watching(name: str, steps: int) -> Iterator[PlainView | LiveView]:
    """The view that suits standard output."""
    console = Console()
    if not console.is_terminal:
        yield PlainView(steps, sys.stdout)
        return
    # No refresh thread: the supervisor forks, and draws whenever it has looked.
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield LiveView(name, steps, live)


def _run_table(rows: Sequence[Row], steps: int, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    row: Row = rows[-1] if rows else {}
    done = row["step"] + 1 if rows else 0
    filled = round(24 * done / steps)
    left = left_text(rows, steps)
    table.add_row("step", f"{done}/{steps}", f"{'━' * filled}{'╌' * (24 - filled)}  {left}")
    if metrics.is_supervised(row):
        _add_training(table, rows, width)
    else:
        curve = _curve(rows, "task_reward", width)
        table.add_row("task reward", number(row.get("task_reward")), curve)
        table.add_row("reward", number(row.get("reward")), "")
        if row.get("length_error") is not None:
            table.add_row("length error", number(row["length_error"]), "tokens")
        lag = f"largest {number(row.get('lag_max'))}"
        table.add_row("lag", number(row.get("lag_mean"), 2), lag)
        trained, sampled = per_second(row.get("tokens_per_s")), row.get("sampler_tokens_per_s")
        table.add_row("tokens/s", per_second(sampled), f"sampled, {trained} trained")
    for name, text in island_pairs(row):
        table.add_row(name, "", text)
    return table


def _add_training(table: Table, rows: Sequence[Row], width: int) -> None:
    """Add the figures of a run that trains on documents."""
    row = rows[-1]
    table.add_row("loss", number(row.get("loss")), _curve(rows, "loss", width))
    held_out = number(metrics.last_known(rows, "held_out_nll"))
    bits = number(metrics.last_known(rows, "held_out_bits_per_byte"))
    table.add_row("held out", held_out, f"nats a token, {bits} bits a byte")
    table.add_row("bits a byte", number(row.get("bits_per_byte")), "of the trained rows")
    islands = "" if island_figures(row) is None else "of all islands, the first's "
    mfu = f"{islands}MFU {share(row.get('mfu'))}"
    table.add_row("tokens/s", per_second(metrics.tokens_per_s(row)), mfu)
    waited = row.get("waited_for")
    whom = f"most for the {waited}" if waited else ""
    if islands:
        table.add_row("waited", share(metrics.wait_share(row)), whom)
    else:
        table.add_row("waited for input", share(metrics.input_wait_share(row)), whom)


def _curve(rows: Sequence[Row], key: str, width: int) -> str:
    """The values of a figure as bars, on a terminal of `width` columns."""
    known = [row[key] for row in rows if row.get(key) is not None]
    return sparkline(known, max(8, min(48, width - 40)))


def start_in_background(run: PreparedRun) -> int:
    """Starts the supervisor of an open run and waits until its roles have started.

    Returns:
        0; or the supervisor's exit code where it has ended by then.
    """
    log = run.directory / "logs" / SUPERVISOR_LOG
    log.parent.mkdir(exist_ok=True)
    with closing(RunState(run.directory)) as state:
        before = state.sessions()
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "runspec.cli.apply", str(run.directory), str(run.lock)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(run.lock,),
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            code = process.poll()
            row = state.run()
            if code is not None:
                print("\n".join(last_lines(log, _LINES)), file=sys.stderr)
                return code
            if state.sessions() > before and row is not None and row.state == "running":
                break
            time.sleep(_POLL_S)
        else:
            print(f"The roles have not started within {START_TIMEOUT_S:.0f} s; it goes on.")
    name = run.spec.name
    print(f"{name} runs in the background, watched by process {process.pid}. To follow it:")
    print(f"  runspec status {run.directory}\n  runspec logs {run.directory} -f")
    print(f"To stop it: runspec pause {run.directory}; to go on: runspec resume {run.directory}")
    return 0


def main(arguments: list[str]) -> int:
    """Supervises a run whose lock this process was started with."""
    run_dir, lock = Path(arguments[0]), int(arguments[1])
    sign_lock(lock)
    run = PreparedRun.inherited(run_dir, lock)
    with StopSignals() as requests:
        outcome = supervise(run, PlainView(run.spec.steps, sys.stdout), requests)
    if outcome.kind == "interrupted":
        print(f"interrupted by {requests.last}")
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
