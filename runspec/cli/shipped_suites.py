"""The suites that come with runspec; their problems lie in a file that the user has."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from runspec.core.errors import BadUsage, UserError

MAX_UNPACKED_BYTES = 8 * 1024**3
"""Most bytes that a file of problems may have when it is unpacked."""
_CHUNK_BYTES = 1024 * 1024
_SUITES = resources.files("runspec.cli") / "suites"


def shipped_names() -> list[str]:
    """Return the names of the shipped suites."""
    names = (entry.name for entry in _SUITES.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def named_suite(suite: str, data: Path | None, folder: Path) -> tuple[Path, Sequence[str]]:
    """Return the file of a suite, and the overrides that say where its problems are.

    Args:
        suite: name of a shipped suite, or a file.
        data: JSON Lines of a shipped suite's problems, also as .gz, or Parquet, or a folder.
        folder: gets files that are made for it.

    Raises:
        BadUsage: `data` is missing, or there although the suite is a file.
        UserError: `data` cannot be unpacked.
    """
    shipped = shipped_names()
    if suite not in shipped:
        if data is not None:
            raise BadUsage(
                "--data is of a shipped suite; a file of your own names its problems itself",
                place=suite,
                remedy=f"the shipped ones are {', '.join(shipped)}",
            )
        if not Path(suite).is_file():
            raise BadUsage(
                "no such file, and no shipped suite",
                place=suite,
                remedy=f"the shipped ones are {', '.join(shipped)}",
            )
        return Path(suite), ()
    if data is None or not data.exists():
        raise BadUsage(
            "its problems are not here" if data is None else f"there is no {data}",
            place=f"suite {suite}",
            remedy="--data FILE; docs/evaluation.md says which data set fits",
        )
    path = folder / f"{suite}.yaml"
    path.write_text((_SUITES / path.name).read_text(encoding="utf-8"), encoding="utf-8")
    data = _unpacked(data, folder) if data.suffix == ".gz" else data.absolute()
    source = f"data.sources.suite-{suite}"
    # LiveCodeBench has a reader of its own, for JSON Lines.
    parquet = data.suffix == ".parquet" and suite != "livecodebench"
    return path, [f"{source}.uri={data}", *([f"{source}.kind=parquet"] if parquet else [])]


def _unpacked(data: Path, folder: Path) -> Path:
    """Write a gzip file's contents into a folder; return the path."""
    path, size = folder / data.stem, 0
    try:
        with gzip.open(data) as packed, path.open("wb") as plain:
            while chunk := packed.read(_CHUNK_BYTES):
                size += plain.write(chunk)
                if size > MAX_UNPACKED_BYTES:
                    raise UserError(f"more than {MAX_UNPACKED_BYTES} bytes", place=str(data))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"cannot be unpacked: {error}", place=str(data), remedy="fetch the file again"
        ) from error
    return path
