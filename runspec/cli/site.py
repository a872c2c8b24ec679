"""`runspec prepare` and `runspec role`: a run on several machines, and one role on one of them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from runspec.cli.apply import carry_out_or_explain
from runspec.cli.spec_files import sound_spec
from runspec.core.address import is_loopback
from runspec.core.errors import UserError
from runspec.core.files import require_writable, write_atomic
from runspec.core.process import Endpoints, address
from runspec.core.spec.load import FILE_NAME as SPEC_FILE
from runspec.core.spec.load import SpecFiles, dump_resolved
from runspec.core.spec.role_names import trunk_names
from runspec.local.backend import LOCAL, pinned
from runspec.local.endpoints import fixed_endpoints
from runspec.local.planning import make_plan
from runspec.local.prepare import link_starting_model, write_targets
from runspec.local.processes import role_specs
from runspec.local.run_dir import hold, own_folder, run_directory
from runspec.local.site import (
    BUNDLES,
    TRUNK_GROUP,
    Disk,
    groups_of,
    install,
    install_role,
    load_bundle,
    make_site,
    require_own,
)


def prepare_command(files: SpecFiles, site: Path) -> int:
    """Makes a site's keys, spec and bundles in a folder; returns the exit code.

    Made again with the same folder, it keeps the keys, so that a changed spec reaches the roles by
    new bundles.
    """
    spec, _ = make_site(sound_spec(files, pins_root=True), site)
    print(f"{spec.name} is prepared in {site}. Bring each machine its bundles, and run there:")
    for group in groups_of(spec):
        many = f"{len(group.members)} processes, each " if len(group.members) > 1 else ""
        again = f"after an error it starts again {group.restart}"
        print(f"{group.name}: {many}on {group.machine}; keeps its {group.disk}; {again}")
        folder = run_directory(spec, None) if group.disk is Disk.RUN else None
        for member in (*group.members, *group.beside):
            print(f"  {shlex.join(group.command(member, site / BUNDLES, folder))}")
    if is_loopback(spec.placement.host):
        print(
            f"The trunk's servers are at {spec.placement.host}: only its own machine reaches them. "
            "Name its address with placement.host."
        )
    print(f"{site / 'keys'} stays here: whoever has the root key can make new roles.")
    return 0


def role_command(name: str | None, path: Path, folder: Path | None, listen: str | None) -> int:
    """Runs a role; returns the trunk's exit code, and never for another role, which it becomes.

    Args:
        name: a process of the bundle, or `trunk` for the supervisor of those of the trunk; None:
            what the bundle is called.
        path: the bundle.
        folder: the role's own; None: the run directory for the trunk, else in `storage.scratch`.
        listen: HOST:PORT of a server that is reached under another address.

    Raises:
        UserError: the bundle is damaged, expired or of another role, or the folder is in use.
    """
    bundle = load_bundle(path)
    name = name or bundle.group
    if name not in bundle.roles:
        raise UserError(
            f"no role {name!r} in the bundle of {bundle.group}",
            place=str(path),
            remedy=f"one of: {', '.join(bundle.roles)}",
        )
    if folder is None:
        shared, spec = bundle.group == TRUNK_GROUP, bundle.spec
        folder = run_directory(spec, None) if shared else own_folder(spec, bundle.group)
    folder = folder.absolute()
    endpoints = fixed_endpoints(bundle.spec)
    _require_address(endpoints, name, listen)
    require_own(bundle, folder)
    if name == TRUNK_GROUP:  # a run of which this machine starts nothing else
        install(bundle, folder)
        placement = bundle.spec.placement.model_copy(update={"roles": [], "backend": LOCAL})
        spec = bundle.spec.model_copy(update={"placement": placement})
        return carry_out_or_explain(make_plan(spec, folder), detach=False)
    own = folder / "work" / name
    require_writable(own, "the role's folder", "mend the permissions, or name another --dir")
    with hold(own, role=name) as lock:
        run = install_role(bundle, folder, endpoints, lock=lock, listen=listen)
        (role,) = role_specs(run, here={name})
        write_targets(folder, bundle.spec, endpoints, bundle.roles)
        if name in trunk_names(bundle.spec):
            write_atomic(folder / SPEC_FILE, dump_resolved(bundle.spec))
            link_starting_model(run.spec, folder, run.machine)
        # The role takes this process over, and the lock of its folder with it.
        os.set_inheritable(lock, True)
        with pinned(role.cores):
            os.execvpe(role.command[0], role.command, {**os.environ, **role.env})  # noqa: S606
    raise AssertionError("a process that was replaced does not return")


def _require_address(endpoints: Endpoints, name: str, listen: str | None) -> None:
    """Refuse an address to listen on that is missing, malformed, or of no server.

    Raises:
        UserError: with what is to be said instead.
    """
    own = endpoints.all().get(name)
    if listen is None:
        if own is not None and not own.startswith("http://"):
            raise UserError(
                f"reached at {own}, where it cannot listen by itself",
                place=name,
                remedy="say with --listen HOST:PORT where it listens behind that",
            )
        return
    if own is None or name == "learner" or name in endpoints.islands:
        raise UserError("has no address of its own", place=name, remedy="leave --listen out")
    try:
        address(f"http://{listen}")
    except UserError as error:
        raise UserError(error.thing, place="--listen", remedy="say HOST:PORT") from error
