"""`runspec diff`: compares the run's spec with a file, line by line.

A calibration profile is shown by its identity (who was measured, until when), not its tables.
"""

from __future__ import annotations

import difflib
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from runspec.cli.spec_files import located
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError, bad_usage
from runspec.core.schema import RunSpec
from runspec.core.schema.findings import format_finding
from runspec.core.schema.load import (
    FILE_NAME,
    SpecFiles,
    dump_resolved,
    load_layers,
    load_resolved,
    parse_resolved,
)
from runspec.core.signed import BadSignature
from runspec.local.planning import STARTS_ANEW, takes_any_change
from runspec.local.run_dir import run_directory
from runspec.plan import difference, of_class

EXIT_SAME, EXIT_DIFFERENT = 0, 1
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


@bad_usage()
def diff_command(files: SpecFiles, runs_dir: Path | None) -> int:
    """Prints the difference as `diff -u` does; returns the exit code."""
    layered = load_layers(files)
    if layered.spec is None:
        found = "\n".join(format_finding(finding) for finding in layered.findings)
        raise UserError(f"no spec to compare:\n{found}", place=str(files.path))
    run_dir = run_directory(layered.spec, runs_dir)
    known = (run_dir / FILE_NAME).exists()
    old = load_resolved(run_dir) if known else None
    new = located(layered.spec, files.path.parent)
    before = _lines(old) if old else []
    there = str(run_dir / FILE_NAME) if known else "/dev/null"
    after = _lines(new)
    lines = list(difflib.unified_diff(before, after, there, str(files.path)))
    console = Console(highlight=False)
    for line in lines:
        # Titles look like added and removed lines: they are told by their place.
        style = "bold" if line in lines[:2] else _STYLES.get(line[0], "")
        console.print(Text(line.rstrip("\n"), style=style), soft_wrap=True)
    if old and of_class(difference(old, new), "newrun") and takes_any_change(run_dir):
        print(STARTS_ANEW, file=sys.stderr)  # no line of the difference
    return EXIT_DIFFERENT if lines else EXIT_SAME


def _lines(spec: RunSpec) -> list[str]:
    """The resolved spec as YAML, every default written out; of profiles, which they are."""
    # Through the form on disk, in which free maps are sorted: their order means nothing.
    on_disk = parse_resolved(dump_resolved(spec), place=FILE_NAME)
    tree = with_identities(on_disk.model_dump(mode="json", by_alias=True))
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).splitlines(keepends=True)


def with_identities(tree: dict[str, Any]) -> dict[str, Any]:
    """A resolved spec as JSON, with what identifies each profile in the place of its document."""
    shown = [
        profile | {"document": profile_identity(profile["document"])}
        if profile["document"]
        else profile
        for profile in tree["verify"]["profiles"]
    ]
    return tree | {"verify": tree["verify"] | {"profiles": shown}}


def profile_identity(document: str) -> dict[str, str | float]:
    """Identify a profile without trusting it: a validator checks its signature.

    Args:
        document: signed, or what was taken for it.

    Returns:
        digest (BLAKE3 of the document) and, where it is a profile, pool, validators, issued,
        expires (days, UTC), rate of false rejections a rollout; else unreadable, which says why.
    """
    from verify.profile import open_profile

    data = document.encode("utf-8", "replace")
    digest = digest_bytes(data)
    try:
        profile = open_profile(data, root_public_key=None, dated=False)
    except BadSignature as error:
        return {"digest": digest, "unreadable": str(error)}
    sampler, validator = profile.sampler, profile.validator
    return {
        "digest": digest,
        "pool": f"{sampler.engine}, {sampler.precision}, {sampler.hardware}",
        "validators": f"{validator.engine}, {validator.precision}, {validator.hardware}",
        "issued": _day(profile.issued),
        "expires": _day(profile.expires),
        "rate": profile.rate,
    }


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()
