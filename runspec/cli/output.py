"""Output of commands, their errors with exit codes, and the options that several share.

The reader of `runspec apply ... | head` goes away while the command trains on. Every command goes
on without output, and its exit code is that of its work. One that prints without end asks
`reader_gone`.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from runspec.core.errors import RunElsewhere, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

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


def outlive_readers() -> None:
    """Makes standard output and standard error discard what nobody reads any more."""
    sys.stdout, sys.stderr = _unbroken(sys.stdout), _unbroken(sys.stderr)


def reader_gone() -> bool:
    """Whether something was written that nobody reads."""
    return _Unbroken.gone


def _unbroken(stream: Any) -> Any:
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


if TYPE_CHECKING:
    from runspec.core.schema.load import SpecFiles

SPEC, RUN = "Specs", "Runs"
"""Panels of the help."""
RUNS = Path("runs")

File = Annotated[Path, typer.Argument(help="The spec.")]
Profile = Annotated[
    str | None, typer.Option("--profile", "-p", help="Overlay in profiles/ beside the spec.")
]
Placement = Annotated[
    Path | None, typer.Option("--placement", help="A file of kind Placement: one site's part.")
]
TemplateName = Literal[
    "laptop", "problems", "sums", "model", "node-8gpu", "tpu-and-volunteers", "pretrain", "sft"
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
Key = Annotated[str, typer.Argument(metavar="KEY", help="A public key, or how it begins.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; the key's holder is told.")]


def duration(value: str | float) -> float:
    """Seconds of a text such as 30s or 7d, or of a default."""
    from runspec.core.schema.fields import DURATION

    return value if isinstance(value, float) else DURATION.parse(value)


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
