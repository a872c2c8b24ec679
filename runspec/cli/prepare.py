"""`runspec prepare`: everything that a site of several machines needs before a process starts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path, PurePath

from runspec.cli.spec_files import sound_spec
from runspec.core.address import is_loopback
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.schema import RunSpec
from runspec.local.run_dir import run_directory
from runspec.local.site import Disk, groups_of
from runspec.local.site_folder import BUNDLES, make_site


def prepare_command(files: SpecFiles, site: Path) -> int:
    """Makes a site's keys, spec and bundles in a folder; returns the exit code.

    Made again with the same folder, it keeps the keys, so that a changed spec reaches the roles by
    new bundles.
    """
    spec = sound_spec(files, pins_root=True)
    resolved, _ = make_site(spec, site)
    _show(resolved, site)
    return 0


def site_lines(spec: RunSpec, bundles: PurePath) -> Iterator[str]:
    """Of each role group where its processes run, what they keep, and the command of each."""
    for group in groups_of(spec):
        many = f"{len(group.members)} processes, each " if len(group.members) > 1 else ""
        again = f"after an error it starts again {group.restart}"
        yield f"{group.name}: {many}on {group.machine}; keeps its {group.disk}; {again}"
        folder = run_directory(spec, None) if group.disk is Disk.RUN else None
        for member in group.members:
            yield f"  {shlex.join(group.command(member, bundles, folder))}"


def _show(spec: RunSpec, site: Path) -> None:
    print(f"{spec.name} is prepared in {site}. Bring each machine its bundles, and run there:")
    print("\n".join(site_lines(spec, site / BUNDLES)))
    if is_loopback(spec.placement.host):
        print(
            f"The trunk's servers are at {spec.placement.host}: only its own machine reaches them. "
            "Name its address with placement.host."
        )
    print(f"{site / 'keys'} stays here: whoever has the root key can make new roles.")
