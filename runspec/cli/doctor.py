"""`runspec doctor`: looks at this machine, and at what a spec would lack here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runspec.cli.spec_files import sound_spec
from runspec.core.spec.load import SpecFiles
from runspec.local.checkup import Check, check_machine
from runspec.local.preflight import Facts, look, missing
from runspec.local.problems import absent_modules, check_problems
from runspec.local.run_dir import RUNS, run_directory

EXIT_WELL, EXIT_NOT_WELL = 0, 1
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor_command(files: SpecFiles | None, runs_dir: Path | None) -> int:
    """Prints the checks; returns 0, or 1 where one failed."""
    facts = look()
    checks = check_machine(facts, runs_dir or RUNS)
    if files is not None:
        checks += check_spec_here(files, facts, runs_dir)
    _show(checks)
    failed = sum(check.verdict == "fail" for check in checks)
    warned = sum(check.verdict == "warn" for check in checks)
    print(f"{len(checks)} checks: {failed} failed, {warned} warnings")
    return EXIT_NOT_WELL if failed else EXIT_WELL


def check_spec_here(files: SpecFiles, facts: Facts, runs_dir: Path | None) -> Iterator[Check]:
    """What the preflight of `apply` says of a spec.

    Raises:
        UserError: the spec has errors.
    """
    spec = sound_spec(files)
    lacking = missing(spec, run_directory(spec, runs_dir), facts)
    if not absent_modules(facts.has_module):
        lacking += check_problems(spec, facts.machine, print).lacking
    yield from (Check(item.path, "fail", item.thing, item.remedy) for item in lacking)
    if not lacking:
        yield Check(spec.name, "ok", "this machine has everything that it needs")


def _show(checks: Sequence[Check]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")  # a path is never cut off
    for check in checks:
        remedy = Text(f"\n{check.remedy}" if check.remedy else "", style="dim")
        verdict = Text(check.verdict, style=_COLOURS[check.verdict])
        table.add_row(verdict, Text(check.name), Text(check.found) + remedy)
    Console(highlight=False).print(table)
