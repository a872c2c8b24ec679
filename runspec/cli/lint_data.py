"""`runspec lint --data`: what is wrong with the problems and the graders of specs, as findings."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from runspec.cli.spec_files import located
from runspec.core.distribution import install_command
from runspec.core.errors import UserError
from runspec.core.spec.findings import Finding
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.validate import locate
from runspec.lint.check import CheckedFiles, check_spec
from runspec.lint.registry import RULES
from runspec.local.machine import this_machine
from runspec.local.problems import absent_modules, check_problems

CODE = "problems"


def with_problems(checked: CheckedFiles, specs: Sequence[SpecFiles]) -> CheckedFiles:
    """The findings of specs, with those of their problems; progress and counts go to stderr.

    Raises:
        UserError: what reads the problems is not installed here.
    """
    if absent := absent_modules():
        raise UserError(
            f"not installed here: {', '.join(absent)}",
            place="--data",
            remedy=f"make install, or {install_command('tasks')}",
        )
    unreadable = {one.file for one in checked.unreadable}
    readable = [files for files in specs if str(files.path) not in unreadable]
    found = [finding for files in readable for finding in _findings(files)]
    return replace(checked, findings=[*checked.findings, *found])


def _findings(files: SpecFiles) -> Iterator[Finding]:
    loaded = check_spec(files)
    name, tree = files.path, loaded.layered.tree
    errors = [finding for finding in loaded.findings if finding.severity == "error"]
    if loaded.spec is None or errors:
        print(f"{name}: its problems are not read: it is no spec without errors", file=sys.stderr)
        return
    spec = located(loaded.spec, files.path.parent)
    problems = check_problems(spec, this_machine(), lambda line: print(line, file=sys.stderr))
    for note in problems.notes:
        print(f"{name}: {note}", file=sys.stderr)
    for lacking in problems.lacking:
        place = locate(tree, tuple(lacking.path.split(".")))[0]
        yield Finding(
            place,
            CODE,
            lacking.thing,
            path=lacking.path,
            requires=RULES[CODE].summary,
            suggestion=lacking.remedy,
        )
