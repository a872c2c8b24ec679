"""Runs campaigns by name and prints their figures as JSON, with date and commit.

    python -m tests.campaigns [NAME ...] [--write] [--list]

Without a name every campaign runs, which takes hours.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from tests import campaigns
from tests.campaigns._benchmarks import CAMPAIGNS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "campaigns.md"
Figures = Mapping[str, object]


def names() -> list[str]:
    """Every module of the package that is a campaign, and the functions of `_benchmarks`."""
    modules = (m.name for m in pkgutil.iter_modules(campaigns.__path__) if m.name[0] != "_")
    return sorted([*modules, *CAMPAIGNS])


def campaign(name: str) -> tuple[Callable[[], Figures], str]:
    """What runs it, and what it shows."""
    found = CAMPAIGNS.get(name) or import_module(f"{campaigns.__name__}.{name}")
    return getattr(found, "run", found), (found.__doc__ or "").partition("\n")[0].rstrip(".")


def commit() -> str:
    """The commit that is checked out; a `+` says that files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))


def parts(name: str, figures: Figures) -> dict[str, Figures]:
    """Rows of the page by their name."""
    if any(not isinstance(value, Mapping) for value in figures.values()):
        return {name: figures}
    return {f"{name}: {part}": value for part, value in figures.items()}  # type: ignore[misc]


def written(page: str, row: str, what: str, figures: Figures, date: str, commit: str) -> str:
    """The page with the row of its table replaced, or added at the table's end."""
    lines = page.splitlines()
    table = [number for number, line in enumerate(lines) if line.startswith("|")]
    old = next((n for n in table if lines[n].startswith(f"| {row} |")), None)
    if old is not None:
        what = lines[old].split(" | ")[1]
    text = ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in figures.items()
    ).replace("|", "/")
    new = f"| {row} | {what} | {text} | {date} | {commit} |"
    if old is not None:
        lines[old] = new
    else:
        lines.insert(table[-1] + 1, new)
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs campaigns and returns the exit code: 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names()))
    parser.add_argument("--list", action="store_true", help="say what each shows, run none")
    parser.add_argument("--write", action="store_true", help="write figures into docs/campaigns.md")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(names()):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    if options.list:
        for name in names():
            print(f"{name:20} {campaign(name)[1]}")
        return 0
    failed = 0
    for name in options.names or names():
        (run, shown), date, at = campaign(name), f"{datetime.now(UTC):%Y-%m-%d}", commit()
        try:
            figures = run()
        except Exception:  # noqa: BLE001 the other campaigns run all the same
            traceback.print_exc()
            failed += 1
            continue
        print(json.dumps({"campaign": name, "date": date, "commit": at, "figures": figures}))
        if options.write:
            page = PAGE.read_text(encoding="utf-8")
            for row, each in parts(name, figures).items():
                page = written(page, row, shown, each, date, at)
            PAGE.write_text(page, encoding="utf-8")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
