"""The `runspec` command. What a command needs is imported inside it, so that help is quick.

Exit codes: 0 done or clean; 1 a finding, or something that a person can mend; 2 a file that cannot
be read, or bad usage; 3 a fault of our own; 4 a role said that the run cannot go on; 5 the run is
alive elsewhere; 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from runspec.common.errors import UserError
from runspec.common.process import EXIT_INTERNAL, EXIT_USER_ERROR

app = typer.Typer(
    help="Decentralised reinforcement learning of language models, declared in one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Profile = Annotated[
    str | None, typer.Option("--profile", "-p", help="Overlay in profiles/ beside the spec.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Changes one value.")
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Where runs lie.")]
Run = Annotated[str, typer.Argument(help="A run's name, or the path of its directory.")]


@app.command()
def lint(
    files: Annotated[list[Path], typer.Argument(help="Specs to check.")],
    profile: Profile = None,
    overrides: Overrides = None,
) -> None:
    """Checks specs. Exits 0 without errors, 1 with them, 2 on an unreadable file or bad usage."""
    from runspec.cli.lint import lint_command

    raise typer.Exit(lint_command(files, profile, overrides or []))


@app.command()
def apply(
    file: Annotated[Path, typer.Argument(help="The spec.")],
    profile: Profile = None,
    overrides: Overrides = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Goes on in the background.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Starts a run, or goes on with it where it was interrupted."""
    from runspec.cli.apply import apply_command

    raise typer.Exit(apply_command(file, profile, overrides or [], detach, runs_dir))


@app.command()
def status(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Says how far a run is, and what each of its roles does."""
    from runspec.cli.status import status_command

    raise typer.Exit(status_command(run, as_json, runs_dir))


@app.command()
def logs(
    run: Run,
    role: Annotated[str | None, typer.Option("--role", help="One role's log only.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Goes on as it grows.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Prints the roles' logs."""
    from runspec.cli.logs import logs_command

    raise typer.Exit(logs_command(run, role, follow, runs_dir))


@app.command()
def delete(
    run: Run,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Does not ask.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Removes a run's directory; refuses while the run is alive."""
    from runspec.cli.delete import delete_command

    raise typer.Exit(delete_command(run, yes, runs_dir))


def main() -> None:
    """Runs the command line and exits."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", EXIT_USER_ERROR))
    except Exception:
        logging.exception("a fault of runspec's own; please report it")
        sys.exit(EXIT_INTERNAL)
