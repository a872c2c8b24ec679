"""The folder of a prepared site: its keys, its spec and its bundles."""

from __future__ import annotations

from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import require_writable, write_atomic
from runspec.core.spec.resolved import FILE_NAME as SPEC_FILE
from runspec.core.spec.resolved import dump_resolved, load_resolved
from runspec.core.spec.schema import RunSpec
from runspec.local.bundle import Bundle, make_bundles
from runspec.local.identity import make_identity
from runspec.local.run_dir import LOCK_FILE
from runspec.local.site import site_spec

BUNDLES = "bundles"


def make_site(spec: RunSpec, site: Path) -> tuple[RunSpec, list[Bundle]]:
    """Makes a site's keys, spec and bundles in a folder; returns the last two.

    Raises:
        UserError: the folder is a run's or another site's, or cannot be written.
    """
    _refuse_other_run(site, spec)
    require_writable(site, "the site's folder", "mend the permissions, or name another folder")
    identity = make_identity(site, spec)
    resolved = site_spec(spec, identity.root_public_key)
    folder = site / BUNDLES
    folder.mkdir(mode=0o700, exist_ok=True)
    bundles = {folder / f"{each.group}.json": each for each in make_bundles(resolved, identity)}
    for path, bundle in bundles.items():
        write_atomic(path, bundle.encode(), mode=0o600)
    for path in set(folder.glob("*.json")) - bundles.keys():
        path.unlink()
    write_atomic(site / SPEC_FILE, dump_resolved(resolved))
    return resolved, list(bundles.values())


def _refuse_other_run(site: Path, spec: RunSpec) -> None:
    remedy = "name another folder with -o"
    if (site / LOCK_FILE).exists():
        raise UserError("a run's directory, not a site", place=str(site), remedy=remedy)
    if (site / SPEC_FILE).exists() and (name := load_resolved(site).name) != spec.name:
        raise UserError(f"the site of another run, {name}", place=str(site), remedy=remedy)
