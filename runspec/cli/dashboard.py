"""`runspec list` and `dashboard`: a folder's runs as a table, and runs on a page."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runspec import cli
from runspec.core.address import is_server_url, parse_address
from runspec.core.errors import UserError, duration, number
from runspec.core.files import write_atomic
from runspec.core.run_files import STATE_FILE, evaluation_files
from runspec.core.schema.load import FILE_NAME as SPEC_FILE
from runspec.core.signed import SigningKey
from runspec.local.diagnosis import evaluation_names, main_figure
from runspec.local.metrics import last_known
from runspec.local.run_dir import SITE_FILE, find_run, read_site
from runspec.local.run_view import look_at
from verify.formats.documents import read_evaluations

if TYPE_CHECKING:
    from runspec.local.dashboard.source import Source

_MAX_RUNS = 8
_MARKS = (SPEC_FILE, STATE_FILE, SITE_FILE)
"""Files of which a run's directory has at least one."""
_NEWEST_BYTES = 64 * 1024
"""How much of a run's metrics.jsonl is read for its row."""


def list_command(
    folder: Annotated[
        Path | None, typer.Argument(help="Where runs lie.", show_default="--runs-dir")
    ] = None,
    as_json: cli.Json = False,
    runs_dir: cli.RunsDir = cli.RUNS,
) -> int:
    """Print a row for each run, the newest first; return the exit code.

    Raises:
        UserError: there is no such folder.
    """
    rows = run_rows(folder or runs_dir)
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    table = cli.plain_table("run", "state", ">step", "newest", ">held out", ">up for", ">age")
    for row in rows:
        if row["step"] is None:
            table.add_row(row["run"], row["state"])
            continue
        of = "task_reward" if row["loss"] is None else "loss"
        table.add_row(
            *(row["run"], row["state"], f"{row['step']}/{row['steps']}"),
            *(f"{of.partition('_')[0]} {number(row[of])}", number(row["held_out"])),
            *(duration(row["up_s"]), duration(time.time() - (row["started"] or time.time()))),
        )
    cli.console().print(table if rows else f"no run in {folder or runs_dir}")
    for row in rows:
        if row["error"]:
            print(f"{row['run']}: {row['error']}")
    return 0


def run_rows(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each run in a folder, the newest first and the unreadable last.

    Keys: run, directory, state (`damaged` where a file of it cannot be read, `on BACKEND` where it
    lies on another machine), step, steps, task_reward (null for a run on documents), loss (null for
    others), held_out (the mean of its first evaluation, or the held-out loss), up_s, started
    (seconds since the epoch), error (why it is damaged, or null). What is not known is null.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(
            "no such folder", place=str(folder), remedy="start a run with `runspec apply`"
        )
    found = {path.parent for mark in _MARKS for path in folder.glob(f"[!.]*/{mark}")}
    rows = [_row(each) for each in sorted(found)]
    return sorted(rows, key=lambda row: -(row["started"] or 0.0))


def _row(run_dir: Path) -> dict[str, Any]:
    empty = ("step", "steps", "task_reward", "loss", "held_out", "up_s", "started", "error")
    row: dict[str, Any] = {"run": run_dir.name, "directory": str(run_dir.absolute()), "state": "-"}
    row |= dict.fromkeys(empty)
    try:
        if (site := read_site(run_dir)) is not None:
            return row | {"state": f"on {site['backend']}"}
        seen = look_at(run_dir, events=0, ledger=False, newest_bytes=_NEWEST_BYTES)
        held_out = last_known(seen.rows, "held_out_nll")
        for name in evaluation_names(seen.spec)[:1]:
            files = [path for path in evaluation_files(run_dir) if path.parent.name == name]
            for result in read_evaluations(files[-1:]):
                figure = result.figures.get(main_figure(result))
                held_out = figure.value if figure else None
    except (UserError, OSError) as error:
        return row | {"state": "damaged", "error": str(error)}
    return row | {
        "state": seen.state,
        "step": seen.trained,
        "steps": seen.spec.steps,
        "task_reward": seen.newest.get("task_reward"),
        "loss": seen.newest.get("loss") if seen.spec.supervised is not None else None,
        "held_out": held_out,
        "up_s": round(seen.wall_s, 3),
        "started": seen.run.started if seen.run else None,
    }


def dashboard_command(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="NAME, the coordinator's URL, or a folder of runs; several lie over each other.",
            show_default="the newest of --runs-dir",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option("--listen", help="HOST:PORT; beyond this machine the page has a token.")
    ] = "127.0.0.1:8765",
    export: Annotated[
        Path | None, typer.Option("--export", help="Writes the page with its data to a file.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="The coordinator's key, for a URL.")
    ] = None,
    trust: Annotated[
        list[str] | None, typer.Option("--trust", help="Key of a watcher whom you believe.")
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Opens it in a browser.")] = False,
    runs_dir: cli.RunsDir = cli.RUNS,
) -> int:
    """Serve the page until Ctrl-C, or write it; return the exit code.

    Raises:
        UserError: there is no such run, or nothing can listen there.
    """
    # Drawn in here: numpy and tokenizers, which other commands do without.
    from runspec.local.dashboard.page import PageData, exported_page
    from runspec.local.dashboard.server import serve

    runs = [name for run in runs or [str(runs_dir)] for name in _named(run, runs_dir)]
    if len(runs) > _MAX_RUNS:
        raise UserError(
            f"{len(runs)} runs, a page shows {_MAX_RUNS}", place="dashboard", remedy="name fewer"
        )
    host, port = parse_address(listen)
    views = [PageData(_source(run, key, runs_dir), trust or ()) for run in runs]
    if export is not None:
        for view in views:
            view.refresh(read_s=float("inf"))
            if view.trouble:
                raise UserError(view.trouble, place=view.name)
        write_atomic(export, exported_page(views).encode())
        print(f"{export}: {', '.join(view.name for view in views)}")
        return 0

    def tell(url: str) -> None:
        print(f"{' and '.join(view.name for view in views)} at {url}  (Ctrl-C ends)", flush=True)
        if browse:
            webbrowser.open(url)

    asyncio.run(serve(views, host, port, tell))
    return 0


def _named(run: str, runs_dir: Path) -> list[str]:
    """Return the run, or the newest runs of the folder that it names."""
    folder = Path(run)
    is_run = (runs_dir / run / SPEC_FILE).exists() or any((folder / m).exists() for m in _MARKS)
    if is_server_url(run) or is_run or not folder.is_dir():
        return [run]
    readable = [row["directory"] for row in run_rows(folder) if row["step"] is not None]
    if not readable:
        raise UserError("no run that can be read", place=run, remedy=f"see `runspec list {run}`")
    if len(readable) > _MAX_RUNS:
        print(f"the {_MAX_RUNS} newest of {len(readable)} runs in {run}", file=sys.stderr)
    return readable[:_MAX_RUNS]


def _source(run: str, key: Path | None, runs_dir: Path) -> Source:
    from runspec.local.dashboard.source import CoordinatorSource, FolderSource

    if not is_server_url(run):
        return FolderSource(find_run(run, runs_dir))
    if key is None:
        raise UserError(
            "only the coordinator's own key may read a run over HTTP",
            place=run,
            remedy="name it with --key runs/NAME/keys/coordinator.key",
        )
    return CoordinatorSource(run, SigningKey.load(key))
