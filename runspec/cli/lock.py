"""`runspec lock`: pins what the names in a spec stand for."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from runspec.core.errors import UserError, bad_usage
from runspec.core.schema.load import SpecFiles

if TYPE_CHECKING:
    from runspec.core.schema import RunSpec

EXIT_FINDINGS = 1


@bad_usage()
def lock_command(files: SpecFiles, check: bool) -> int:
    """Writes the lock beside the spec, or says what is stale in it; returns the exit code.

    The spec must fit the schema; its rules may complain, for one of them asks for this lock.
    """
    from runspec.core.schema.findings import format_finding
    from runspec.core.schema.load import load_layers

    layered = load_layers(files)
    if layered.kind != "Run":
        what = f"a file of kind {layered.kind} names nothing to pin"
        raise UserError(what, place=str(files.path), remedy="lock a spec")
    if layered.spec is None:
        for finding in layered.findings:
            print(format_finding(finding), file=sys.stderr)
        return EXIT_FINDINGS
    return _check(layered.spec, files) if check else _write(layered.spec, files)


def _check(spec: RunSpec, files: SpecFiles) -> int:
    from runspec.core.schema.lock_file import lock_path
    from runspec.lock import check_lock

    path = lock_path(files.path, files.profile)
    if not path.is_file():
        print(f"{path} is not there: make it with `runspec lock`")
        return EXIT_FINDINGS
    stale = check_lock(spec, files.path, files.profile)
    for sentence in stale:
        print(sentence)
    if not stale:
        print(f"{path} holds")
    return EXIT_FINDINGS if stale else 0


def _write(spec: RunSpec, files: SpecFiles) -> int:
    from runspec.core.schema.lock_file import LOCK_VERSION, Lock, write_lock
    from runspec.lock import find_pins

    seen = find_pins(spec, files.path.parent, os.environ)
    problems = {**seen.unknown, **seen.absent}
    if problems:
        for path, what in problems.items():
            print(f"error: {path}: {what}", file=sys.stderr)
        print("nothing was written: a lock pins everything or is none", file=sys.stderr)
        return EXIT_FINDINGS
    for path, what in seen.open.items():
        print(f"warning: {path}: {what}", file=sys.stderr)
    lock = Lock(version=LOCK_VERSION, pins=seen.pins)
    print(f"wrote {write_lock(lock, files.path, files.profile)}")
    return 0
