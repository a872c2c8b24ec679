"""`runspec init`: a commented spec to start from, with what editors, commits and CI need for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from string import Template

from runspec.core.errors import UserError, bad_usage
from runspec.core.files import temporary_name
from runspec.core.spec.json_schema import json_schema

SPEC, SCHEMA = "spec.yaml", "runspec.schema.json"
# For JetBrains' editors and for those with yaml-language-server; the first wants its line first.
MODELINES = f"# $schema: ./{SCHEMA}\n# yaml-language-server: $schema=./{SCHEMA}\n"
_TARGET = {
    "target-short": {"title": "TARGET-SHORT", "targets": "[1000, 2000, 3000, 4000]"},
    "target-long": {"title": "TARGET-LONG", "targets": "[2000, 4000, 6000, 8000, 10000]"},
}
SOURCES = ("laptop", *_TARGET)


@bad_usage()
def init_command(folder: Path, source: str, force: bool) -> int:
    """Writes the files; returns the exit code."""
    files = initial_files(source)
    write_all(folder, files, force=force)
    for name in files:
        print(folder / name)
    print(f"\nnext: runspec lint {folder / SPEC}", file=sys.stderr)
    return 0


def initial_files(source: str) -> dict[str, str]:
    """The files of a new project by their names; `source` is one of `SOURCES`."""
    if source == "laptop":
        spec = _template("laptop.yaml")
    else:
        spec = Template(_template("target.yaml")).substitute(_TARGET[source], name=source)
    return {
        SPEC: MODELINES + spec,
        SCHEMA: json.dumps(json_schema("07"), indent=1, ensure_ascii=False) + "\n",
        ".pre-commit-config.yaml": _template("pre-commit.yaml"),
        ".github/workflows/runspec.yaml": _template("workflow.yaml"),
    }


def write_all(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    """Writes files under temporary names and renames them once all are written.

    Raises:
        UserError: one is there already and `force` is false, or one cannot be written; then none
            is.
    """
    there = [name for name in files if (folder / name).exists()]
    if there and not force:
        raise UserError(
            f"already there: {', '.join(there)}",
            place=str(folder),
            remedy="choose another folder, or add --force to write over them",
        )
    written: dict[Path, Path] = {}
    try:
        for name, text in files.items():
            path = folder / name
            if path.is_dir():
                raise IsADirectoryError(f"{name} is a directory")
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_name(path)
            written[temporary] = path
            temporary.write_text(text, encoding="utf-8")
        for temporary, path in written.items():
            temporary.rename(path)
    except OSError as error:
        for temporary in written:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise UserError(
            f"cannot write: {error.strerror or error}",
            place=str(folder),
            remedy="choose a folder that can be written",
        ) from error


def _template(name: str) -> str:
    return (resources.files("runspec.cli") / "templates" / name).read_text(encoding="utf-8")
