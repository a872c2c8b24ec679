"""Options that several commands take, and the table that they print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from runspec.core.schema.load import SpecFiles

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
