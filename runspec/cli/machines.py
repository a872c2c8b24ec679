"""Declares the commands about machines and workers: from prepare and join to ban."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runspec.cli.output import (
    RUN,
    RUNS,
    File,
    Json,
    Key,
    Overrides,
    Placement,
    Profile,
    Reason,
    Run,
    RunsDir,
    SpecRunsDir,
    duration,
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
    from runspec.cli.site import prepare_command

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
    from runspec.cli.site import role_command

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


@app.command(rich_help_panel=RUN)
def join(
    link: Annotated[str, typer.Argument(metavar="URL", help="The run's join link.")],
    key: Annotated[Path, typer.Option("--key", help="Yours; made where there is none.")],
    public_key: Annotated[
        str | None, typer.Option("--public-key", help="The run's root, where URL has none.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="The run's name, where URL has none.")
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option("--pool", help="Which to serve.", show_default="the first that fits"),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Keeps versions, data, log.", show_default="join/RUN"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only says whether this machine fits.")
    ] = False,
) -> None:
    """Samples for somebody's run with this machine, until it is finished or Ctrl-C."""
    from runspec.cli.join import JoinOptions, join_command

    options = JoinOptions(link, key, public_key, run, pool, folder, check)
    raise typer.Exit(join_command(options))


@app.command(rich_help_panel=RUN)
def invite(
    run: Run,
    pool: Annotated[
        str | None, typer.Option("--pool", help="For one pool only.", show_default="any")
    ] = None,
    uses: Annotated[
        int, typer.Option("--uses", min=1, max=1_000_000, help="Keys that may come with it.")
    ] = 1,
    expires: Annotated[
        float,
        typer.Option(parser=duration, metavar="TIME", help="For how long.", show_default="7d"),
    ] = 7 * 86400.0,
    listed: Annotated[
        bool, typer.Option("--list", help="Lists the invites instead; the run must be up.")
    ] = False,
    revoke: Annotated[
        str | None,
        typer.Option(
            "--revoke",
            metavar="INVITE",
            help="Revokes one instead: its link, its key, or how that begins.",
            show_default=False,
        ),
    ] = None,
    reason: Annotated[
        str, typer.Option("--reason", help="Why it is revoked; who comes with it is told.")
    ] = "the link is no longer valid",
    as_json: Annotated[bool, typer.Option("--json", help="With --list, for programs.")] = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Prints a join link by which so many keys may register, lists such links, or revokes one."""
    from runspec.cli.workers import invite_command, list_invites, revoke_invite

    if revoke is not None:
        raise typer.Exit(revoke_invite(run, revoke, reason, runs_dir))
    if listed:
        raise typer.Exit(list_invites(run, as_json, runs_dir))
    raise typer.Exit(invite_command(run, pool, uses, expires, runs_dir))


@app.command(rich_help_panel=RUN)
def workers(run: Run, as_json: Json = False, runs_dir: RunsDir = RUNS) -> None:
    """Lists a run's workers: standing, reputation, credits."""
    from runspec.cli.workers import workers_command

    raise typer.Exit(workers_command(run, as_json, runs_dir))


@app.command(rich_help_panel=RUN)
def ban(run: Run, key: Key, reason: Reason, runs_dir: RunsDir = RUNS) -> None:
    """Refuses a key's requests from now on, and ends its open leases."""
    from runspec.cli.workers import ban_command

    raise typer.Exit(ban_command(run, key, reason, runs_dir))


@app.command(rich_help_panel=RUN)
def unban(run: Run, key: Key, reason: Reason, runs_dir: RunsDir = RUNS) -> None:
    """Grants an appeal: the key may work again, watched closely at first."""
    from runspec.cli.workers import unban_command

    raise typer.Exit(unban_command(run, key, reason, runs_dir))
