"""`runspec dashboard` shows runs on a page; `runspec monitor` sends a run's figures to a tool."""

from __future__ import annotations

import asyncio
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runspec.core.address import is_server_url
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.process import run_role, stop_event
from runspec.core.schema.load import load_resolved
from runspec.core.signed import SigningKey
from runspec.local.monitors.follow import follow
from runspec.local.run_dir import find_run

if TYPE_CHECKING:
    from runspec.local.dashboard.source import Source

_MAX_RUNS = 8


def dashboard_command(
    runs: Sequence[str],
    listen: str,
    export: Path | None,
    key: Path | None,
    runs_dir: Path,
    *,
    browse: bool,
) -> int:
    """Serve the page until Ctrl-C, or write it; return the exit code.

    Args:
        runs: names, directories or URLs of coordinators; the curves of several lie over each
            other.
        listen: HOST:PORT.
        export: file to write instead.
        key: file of the coordinators' key, for URLs.
        runs_dir: folder of runs.
        browse: whether to open the page in a browser.

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


def monitor_command(run: str, name: str, runs_dir: Path) -> int:
    """Follows a run while it is alive, or sends what is there; returns the exit code of a role.

    Raises:
        UserError: there is no such run, or its spec has no such monitor.
    """
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
