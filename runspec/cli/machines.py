"""The commands about machines: what one lacks, what several are given, one role on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runspec.cli.options import (
    RUN,
    File,
    Overrides,
    Placement,
    Profile,
    SpecRunsDir,
    files_named,
)

app = typer.Typer()


@app.command(rich_help_panel=RUN)
def prepare(
    file: File,
    site: Annotated[Path, typer.Option("-o", "--out", metavar="SITE", help="Folder to make.")],
    profile: Profile = None,
    placement: Placement = None,
    overrides: Overrides = None,
) -> None:
    """Makes the keys, addresses and bundles of a run that several machines share."""
    from runspec.cli.prepare import prepare_command

    raise typer.Exit(prepare_command(files_named(file, profile, placement, overrides), site))


@app.command(rich_help_panel=RUN)
def role(
    bundle: Annotated[Path, typer.Option("--bundle", metavar="FILE", help="What it may know.")],
    name: Annotated[
        str | None,
        typer.Argument(
            help="A process, or trunk: what shares the run directory.", show_default="the bundle's"
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Its own.", show_default="in storage.scratch; the run directory"
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help="Of a server behind a proxy."),
    ] = None,
) -> None:
    """Runs one role of a prepared site on this machine."""
    from runspec.cli.role import role_command

    raise typer.Exit(role_command(name, bundle, folder, listen))


@app.command(rich_help_panel=RUN)
def doctor(
    file: Annotated[Path | None, typer.Argument(help="A spec that should run here.")] = None,
    profile: Profile = None,
    placement: Placement = None,
    overrides: Overrides = None,
    runs_dir: SpecRunsDir = None,
) -> None:
    """Looks at this machine: packages, devices, disk, and what a spec would lack here."""
    from runspec.cli.doctor import doctor_command

    files = files_named(file, profile, placement, overrides) if file is not None else None
    raise typer.Exit(doctor_command(files, runs_dir))
