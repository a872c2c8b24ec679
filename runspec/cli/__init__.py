"""The `runspec` command, and options and a table that several of its commands share.

Its commands by panel and name are below. What a command takes and does is the function
`NAME_command` of its module, which is imported when the command is called: help stays quick.

The reader of `runspec apply ... | head` goes away while the command trains on. Every command goes
on without output, and its exit code is that of its work. One that prints without end asks
`reader_gone`.

Exit codes:
    0: done, or clean.
    1: a finding, or something that a person can mend.
    2: a file that cannot be read, or bad usage.
    3: a fault of our own.
    4: a plan is stale, or a role says that the run cannot go on.
    5: the run is held elsewhere.
    6: `plan --exit-code` finds changes.
    130: interrupted.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from runspec.core.errors import RunElsewhere, UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from runspec.core.schema.load import SpecFiles

_SPECS = {
    "init.init": "Writes a commented spec, its pre-commit hook and a CI step.",
    "lint.lint": "Checks specs. Exits 0 clean, 1 with findings, 2 on an unreadable file or bad "
    "usage.",
    "explain.explain": "Explains a field of the spec, a rule, or a kind of reward, source or "
    "monitor.",
    "lint.render": "Prints the resolved spec, every default written out, or writes what starts it "
    "elsewhere.",
    "lint.lock": "Pins model, tokenizer and data by commit and digest, in FILE.lock.yaml.",
    "explain.schema": "Prints the JSON Schema of the spec.",
}
_RUNS = {
    "plan.plan": "Says what would change, what it needs, how long a step takes and what it costs.",
    "simulate.simulate": "Simulates a run with volunteers that come, go and attack. Exits 1 if it "
    "stalls.",
    "plan.diff": "Shows how a spec differs from the run's own. Exits 0 without differences, 1 with "
    "some.",
    "apply.apply": "Starts a run, changes it, or goes on with it where it was interrupted.",
    "dashboard.list": "Lists a folder's runs: state, step, reward or loss, held-out figure, age.",
    "status.status": "Says how far a run is, and what each of its roles does.",
    "status.describe": "Says everything of a run: spec, conditions, roles, versions, checkpoints, "
    "events.",
    "runs.events": "Prints what happened to a run, oldest first.",
    "runs.logs": "Prints the roles' logs.",
    "runs.wait": "Waits until a condition of a run holds. Exits 1 if it cannot any more, or in "
    "time.",
    "runs.pause": "Stops a run's roles in order; `resume` goes on from the newest checkpoint.",
    "runs.resume": "Goes on with a run that was paused or interrupted, as it is.",
    "runs.rollback": "Takes a stopped run back to a checkpoint; what came after it is removed.",
    "runs.delete": "Removes a run's directory; refuses while the run is alive.",
    "runs.monitor": "Sends what a monitor lacks of a run; `apply` starts one for each monitor by "
    "itself.",
    "dashboard.dashboard": "Shows runs in the browser: curves, roles, who waits for whom, and "
    "every rollout.",
    "evaluate.evaluate": "Evaluates a version of a run, or any model, on problems from files or by "
    "another tool.",
    "follow.serve": "Serves a version by vLLM's OpenAI-compatible server; further options are "
    "vLLM's.",
    "serve.chat": "Talks to a version in the terminal.",
    "runs.export": "Writes a published version as a Hugging Face directory with a model card.",
    "machines.prepare": "Makes the keys, addresses and bundles of a run that several machines "
    "share.",
    "machines.role": "Runs one role of a prepared site on this machine.",
    "checks.doctor": "Looks at this machine: packages, devices, disk, and what a spec would lack "
    "here.",
    "machines.join": "Samples for somebody's run with this machine, until it is finished or "
    "Ctrl-C.",
    "relay.relay": "Serves weights of somebody's run from this machine, until Ctrl-C.",
    "watch.watch": "Trains drawn steps of somebody's run again, until Ctrl-C, and signs what came "
    "of them.",
    "workers.invite": "Prints a join link by which so many keys may register, lists such links, or "
    "revokes one.",
    "workers.workers": "Lists a run's workers: standing, reputation, credits.",
    "workers.ban": "Refuses a key's requests from now on, and ends its open leases.",
    "workers.unban": "Grants an appeal: the key may work again, watched closely at first.",
}
_COMMANDS = _SPECS | _RUNS
"""Help of each command by its module and name."""
_SETTINGS: dict[str, dict[str, Any]] = {
    "evaluate": {"allow_extra_args": True},
    "serve": {"allow_extra_args": True, "ignore_unknown_options": True},
}
"""The commands that pass words on to another program."""


class _Commands(TyperGroup):
    """Knows names and help of its commands, and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of the command that is called, the command, and its arguments."""
        name, _, rest = super().resolve_command(ctx, args)
        [(home, text)] = (item for item in _COMMANDS.items() if item[0].endswith(f".{name}"))
        module = import_module(f"runspec.cli.{home.partition('.')[0]}")
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        declare = alone.command(name, help=text, context_settings=_SETTINGS.get(name or ""))
        declare(getattr(module, f"{name}_command"))
        return name, typer.main.get_command(alone), rest


def _end(exit_code: int) -> None:
    """End the process with the exit code that a command returned."""
    raise typer.Exit(exit_code)


app = typer.Typer(
    cls=_Commands,
    result_callback=_end,
    help="Decentralised reinforcement learning of language models, declared in one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _panel, _commands in (("Specs", _SPECS), ("Runs", _RUNS)):
    for _home, _help in _commands.items():
        app.command(_home.partition(".")[2], help=_help, rich_help_panel=_panel)(lambda: None)


_REFUSALS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}
"""Errors of a disk that a person can mend, wherever they come up."""


class _Unbroken(io.FileIO):
    """A file descriptor that discards what is written once nobody reads it."""

    gone = False

    def write(self, data: Any) -> int:
        """Writes a buffer of bytes, as `io.FileIO` does; returns how many."""
        try:
            return super().write(data)
        except BrokenPipeError:
            _Unbroken.gone = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def reader_gone() -> bool:
    """Whether something was written that nobody reads."""
    return _Unbroken.gone


def _unbroken(stream: Any) -> Any:
    """The stream, which from now on discards what nobody reads any more."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError):  # closed from the start, or no file
        return stream
    raw = io.BufferedWriter(_Unbroken(descriptor, "w", closefd=False))
    return io.TextIOWrapper(
        raw, stream.encoding, stream.errors, line_buffering=stream.line_buffering
    )


def exit_code_of(work: Callable[[], int]) -> int:
    """Return the exit code of `work`, or that of the error that ends it, which is printed."""
    try:
        return work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except RunElsewhere as run:
        carry = run.carry
        return exit_code_of(lambda: carry(sys.argv[1:]))
    except KeyboardInterrupt:
        from runspec.local.backend import EXIT_INTERRUPTED

        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.filename and error.errno in _REFUSALS:
            print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
            print("  remedy: mend the permissions, free space, or name another", file=sys.stderr)
            return 1
        import logging

        from runspec.core.process import EXIT_INTERNAL

        logging.exception("a fault of runspec's own; please report it")
        return EXIT_INTERNAL


def main() -> None:
    """Runs the command line and exits."""
    # What imports make stays: looking for cycles in it took a tenth of a cold `runspec lint`.
    gc.set_threshold(100_000)
    # Pydantic would look for plugins in every installed package; specs need none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    sys.stdout, sys.stderr = _unbroken(sys.stdout), _unbroken(sys.stderr)
    sys.exit(exit_code_of(app))


RUNS = Path("runs")

File = Annotated[Path, typer.Argument(help="The spec.")]
Profile = Annotated[
    str | None, typer.Option("--profile", "-p", help="Overlay in profiles/ beside the spec.")
]
Placement = Annotated[
    Path | None, typer.Option("--placement", help="A file of kind Placement: one site's part.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Changes one value.")
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Where runs lie.")]
SpecRunsDir = Annotated[
    Path | None,
    typer.Option("--runs-dir", help="Where runs lie.", show_default="storage.dir, or runs"),
]
Run = Annotated[str, typer.Argument(help="A run's name, or the path of its directory.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Does not ask.")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Goes on in the background.")]
Follow = Annotated[bool, typer.Option("-f", "--follow", help="Goes on as it grows.")]


def duration(value: str | float) -> float:
    """Seconds of a text such as 30s or 7d, or of a default."""
    from runspec.core.schema.fields import DURATION

    try:
        return value if isinstance(value, float) else DURATION.parse(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def files_named(
    file: Path, profile: str | None, placement: Path | None, overrides: list[str] | None
) -> SpecFiles:
    """The files that a spec is read from, as the command line names them."""
    from runspec.core.schema.load import SpecFiles

    return SpecFiles(file, profile, placement, tuple(overrides or ()))


def words_of(files: SpecFiles, runs_dir: Path | None) -> list[str]:
    """The arguments of a command line that name these files and the folder of runs."""
    profile = [] if files.profile is None else ["--profile", files.profile]
    placement = [] if files.placement is None else ["--placement", str(files.placement)]
    sets = [word for text in files.overrides for word in ("--set", text)]
    where = [] if runs_dir is None else ["--runs-dir", str(runs_dir)]
    return [str(files.path), *profile, *placement, *sets, *where]


def plain_table(*columns: str) -> Table:
    """A table without lines; names starting with > are columns of numbers.

    Where the terminal is narrow, text goes on in the line below; nothing is cut off.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        justify: Literal["right", "left"] = "right" if column[:1] == ">" else "left"
        table.add_column(column.lstrip(">"), justify=justify, overflow="fold")
    return table


def console() -> Console:
    """Standard output for words of any source, wrapped at words on a terminal only."""
    from rich.console import Console

    found = Console(markup=False, highlight=False, emoji=False)
    found.soft_wrap = not found.is_terminal
    return found
