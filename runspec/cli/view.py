"""The view of a run under `apply`: a live panel on a terminal, plain lines elsewhere.

Other commands print its lines and tables too.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runspec.core.files import FULL
from runspec.local import metrics
from runspec.local.formatting import duration, latency, number, per_second, share, sparkline
from runspec.local.metrics import Row, commit_text, island_figures, island_pairs
from runspec.local.state import RoleRow

LINE_EVERY_S = 5.0
FRAME_EVERY_S = 0.5
_EVENTS_SHOWN = 4
_COLOURS = {
    "running": "green",
    "starting": "cyan",
    "renewing": "cyan",
    "backoff": "yellow",
    "failed": "red",
    "finished": "blue",
    "waiting": "bright_black",
    "ended": "bright_black",
}


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


def step_line(rows: Sequence[Row], steps: int) -> str:
    """One line on the newest step; `rows` are not empty."""
    row = rows[-1]
    commit = commit_text(row)
    islands = f"  {commit}" if commit else ""
    if metrics.is_supervised(row):
        nll = number(metrics.last_known(rows, "held_out_nll"))
        bits = number(metrics.last_known(rows, "held_out_bits_per_byte"))
        waited = f"waited for input {share(metrics.input_wait_share(row))}"
        if island_figures(row) is not None:
            whom = row.get("waited_for") or "islands"
            waited = f"waited {share(_wait_share(row))}, most for the {whom}"
        return (
            f"step {row['step'] + 1}/{steps}  loss {number(row.get('loss'))}  "
            f"held out {nll} ({bits} bits a byte)  {per_second(_tokens_per_s(row))} tok/s  "
            f"MFU {share(row.get('mfu'))}  {waited}{islands}"
        )
    return (
        f"step {row['step'] + 1}/{steps}  task {number(row.get('task_reward'))}  "
        f"reward {number(row.get('reward'))}  length error {number(row.get('length_error'))}  "
        f"lag {number(row.get('lag_mean'), 2)}  {per_second(row.get('sampler_tokens_per_s'))} tok/s"
        f"{islands}"
    )


def _tokens_per_s(row: Row) -> float | None:
    """Return the trained tokens a second, with those of other islands."""
    figures = island_figures(row)
    return row.get("tokens_per_s") if figures is None else figures["tokens_per_s"]


def _wait_share(row: Row) -> float | None:
    busy = row.get("learner_busy_fraction")
    return None if busy is None else 1.0 - busy


def latency_line(row: Row) -> str:
    """How long submissions waited of late; empty where a step's row does not say."""
    if row.get("verdict_latency_p50") is None:
        return ""
    verdict, manifest = (
        "{} (p99 {})".format(*latency(row, name)) for name in ("verdict", "manifest")
    )
    return f"from a submission to its verdict {verdict}, to the batch that trains it {manifest}"


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
        table.add_row("length error", number(row.get("length_error")), "tokens")
        lag = f"largest {number(row.get('lag_max'))}"
        table.add_row("lag", number(row.get("lag_mean"), 2), lag)
        trained, sampled = per_second(row.get("tokens_per_s")), row.get("sampler_tokens_per_s")
        table.add_row("tokens/s", per_second(sampled), f"sampled, {trained} trained")
    for name, text in island_pairs(row):
        table.add_row(name, "", text)
    return table


def left_text(rows: Sequence[Row], steps: int) -> str:
    """Return about how long the run will go on; empty where that is not known, or it is over."""
    left = metrics.time_left_s(rows, steps)
    return f"about {duration(left)} left" if left else ""


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
    table.add_row("tokens/s", per_second(_tokens_per_s(row)), mfu)
    waited = row.get("waited_for")
    whom = f"most for the {waited}" if waited else ""
    if islands:
        table.add_row("waited", share(_wait_share(row)), whom)
    else:
        table.add_row("waited for input", share(metrics.input_wait_share(row)), whom)


def _curve(rows: Sequence[Row], key: str, width: int) -> str:
    """The values of a figure as bars, on a terminal of `width` columns."""
    known = [row[key] for row in rows if row.get(key) is not None]
    return sparkline(known, max(8, min(48, width - 40)))


def role_table(roles: Sequence[RoleRow], stages: Mapping[str, str] | None = None) -> Table:
    """The roles, with what those are at that are at a long stage, by name."""
    table = plain_table("role", "state", "restarts", "process", "since")
    for role in roles:
        state, process = Text(role.state, style=_COLOURS[role.state]), str(role.pid or "")
        if stages and role.name in stages:
            state.append(f", {stages[role.name]}", style="cyan")
        table.add_row(role.name, state, str(role.restarts), process, clock(role.since))
    return table


def clock(at: float | None) -> str:
    """The time of day, with the date where that is not today."""
    if at is None:
        return ""
    then = time.localtime(at)
    today = time.localtime()[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", then)


def plain_table(*columns: str) -> Table:
    """A table without lines; names starting with > are columns of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column[:1] == ">" else "left")
    return table
