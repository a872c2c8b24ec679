"""`runspec dashboard`: shows runs on a page."""

from __future__ import annotations

import asyncio
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runspec.cli import options
from runspec.core.address import is_server_url
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.signed import SigningKey
from runspec.local.run_dir import find_run

if TYPE_CHECKING:
    from runspec.local.dashboard.source import Source

_MAX_RUNS = 8


def dashboard_command(
    runs: Annotated[
        list[str],
        typer.Argument(help="NAME, or the coordinator's URL; several lie over each other."),
    ],
    listen: Annotated[
        str, typer.Option("--listen", help="HOST:PORT; beyond this machine the page has a token.")
    ] = "127.0.0.1:8765",
    export: Annotated[
        Path | None, typer.Option("--export", help="Writes the page with its data to a file.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="The coordinator's key, for a URL.")
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Opens it in a browser.")] = False,
    runs_dir: options.RunsDir = options.RUNS,
) -> int:
    """Serve the page until Ctrl-C, or write it; return the exit code.

    Raises:
        UserError: there is no such run, or nothing can listen there.
    """
    # Drawn in here: numpy and tokenizers, which other commands do without.
    from runspec.local.dashboard.page import PageData, exported_page
    from runspec.local.dashboard.server import serve

    if len(runs) > _MAX_RUNS:
        raise UserError(
            f"{len(runs)} runs, a page shows {_MAX_RUNS}", place="dashboard", remedy="name fewer"
        )
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(
            f"{listen[:100]!r} is no address", place="--listen", remedy="write 127.0.0.1:8080"
        )
    views = [PageData(_source(run, key, runs_dir)) for run in runs]
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

    asyncio.run(serve(views, host.strip("[]"), int(port), tell))
    return 0


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
