"""Where the role groups of a run are started, and by which commands: for `plan`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from runspec.core.spec.load import SpecFiles
from runspec.core.spec.schema import RunSpec
from runspec.local.backend import LOCAL
from runspec.local.bundle import TRUNK_GROUP
from runspec.local.run_dir import run_directory
from runspec.local.site import ANY_MACHINE, Disk, groups_of
from runspec.local.site_folder import BUNDLES

SITE = PurePath("SITE")
"""Stands for the folder that `runspec prepare` is to make."""


def role_groups(spec: RunSpec, files: SpecFiles, runs_dir: Path | None) -> list[dict[str, Any]]:
    """Each role group with its processes, the machine of each, and what starts them.

    `here` says whether `runspec apply` does, on this machine or the backend's; `commands` is then
    that command, else one for each process.
    """
    named, groups = spec.placement.roles, []
    where = [] if runs_dir is None else ["--runs-dir", str(runs_dir)]
    apply = ["runspec", "apply", *words_of(files), *where]
    for group in groups_of(spec):
        here = (
            named is None or spec.placement.backend != LOCAL or group.name in (TRUNK_GROUP, *named)
        )
        folder = run_directory(spec, runs_dir) if group.disk is Disk.RUN else None
        alone = [group.command(member, SITE / BUNDLES, folder) for member in group.members]
        groups.append(
            {
                "name": group.name,
                "processes": list(group.members),
                "machine": group.machine,
                "here": here,
                "commands": [shlex.join(words) for words in ([apply] if here else alone)],
            }
        )
    return groups


def where_lines(spec: RunSpec, groups: list[dict[str, Any]], files: SpecFiles) -> Iterator[str]:
    """What `role_groups` found, for people."""
    backend = spec.placement.backend
    starter = "this machine" if backend == LOCAL else f"machines of {backend}"
    here = [group for group in groups if group["here"]]
    away = [group for group in groups if not group["here"]]
    yield f"  {starter}, by `apply`: {', '.join(map(_what, here))}"
    yield f"    {here[0]['commands'][0]}"
    for group in away:
        more = f", and {count - 1} more" if (count := len(group["commands"])) > 1 else ""
        yield f"  others: {_what(group)}"
        yield f"    {group['commands'][0]}{more}"
    if away:
        prepare = shlex.join(["runspec", "prepare", *words_of(files), "-o", str(SITE)])
        yield f"  bundles come from `{prepare}`, whose trunk then takes the place of `apply`;"
        yield "  volunteers need none: they call `runspec join LINK` (docs/join.md)"


def _what(group: dict[str, Any]) -> str:
    """The group's name, and the accelerators of a process where it has some."""
    where = "" if group["machine"] == ANY_MACHINE else f" ({group['machine']})"
    return f"{group['name']}{where}"


def words_of(files: SpecFiles) -> list[str]:
    """The options that name these files on a command line."""
    profile = [] if files.profile is None else ["--profile", files.profile]
    placement = [] if files.placement is None else ["--placement", str(files.placement)]
    sets = [word for text in files.overrides for word in ("--set", text)]
    return [str(files.path), *profile, *placement, *sets]
