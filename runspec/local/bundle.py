"""Bundles: what one role group of a site is given before its processes start, and nothing more.

    {"format": 1, "group": "validator-0", "roles": ["validator-0"], "spec": {...},
     "roles.json": "...", "keys": {"validator-0": SECRET}, "workers": {}}

A bundle is a file of JSON, readable by its owner alone. The trunk's names the processes that share
the run directory, and the public keys of the run's own workers; every other names one process. The
spec is resolved, pins the root's public key and fixes every address. Of private keys a bundle has
those of its own processes. An island's first bundle names the server of its shares too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, require_writable, write_atomic
from runspec.core.role_start import Endpoints, save_endpoints
from runspec.core.roles import OWN_WORKERS_FILE, open_roles, read_own_workers
from runspec.core.signed import BadSignature, SigningKey
from runspec.core.spec import role_names
from runspec.core.spec.load import FILE_NAME as SPEC_FILE
from runspec.core.spec.load import MAX_BYTES as MAX_SPEC_BYTES
from runspec.core.spec.load import dump_resolved, load_resolved, parse_resolved
from runspec.core.spec.role_names import island_names
from runspec.core.spec.schema import RunSpec
from runspec.local.formatting import reported
from runspec.local.identity import Identity
from runspec.local.machine import this_machine
from runspec.local.processes import PreparedRun
from runspec.local.run_dir import write_spec

FORMAT = 1
MAX_BYTES = 2 * MAX_SPEC_BYTES
TRUNK_GROUP = "trunk"
"""The bundle of the processes that share the run directory; as a role, the supervisor of them."""
_REMEDY = "make bundles with `runspec prepare`"


@dataclass(frozen=True)
class Bundle:
    """The keys and files that the processes of one role group may have."""

    group: str
    """Names the bundle; of all but the trunk's, its first process."""
    roles: tuple[str, ...]
    """Processes that can be started from it."""
    spec: RunSpec
    """Resolved; it pins the root and fixes the addresses."""
    roles_document: bytes
    """The run's roles.json."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Private keys, 64 hex characters, by process."""
    workers: Mapping[str, str] = field(default_factory=dict)
    """Public keys of the run's own workers, for the trunk."""

    @property
    def root_public_key(self) -> str:
        root = self.spec.identity.root_public_key
        assert root is not None, "a bundle's spec pins it"
        return root

    def encode(self) -> bytes:
        return canonical_json(
            {
                "format": FORMAT,
                "group": self.group,
                "roles": list(self.roles),
                "spec": parse_object(dump_resolved(self.spec), max_bytes=MAX_SPEC_BYTES),
                "roles.json": self.roles_document.decode(),
                "keys": dict(self.keys),
                "workers": dict(self.workers),
            }
        )


def decode_bundle(data: bytes, *, place: str) -> Bundle:
    """Reads a bundle.

    Raises:
        UserError: it is none, it is damaged, or the roles.json in it counts no more.
    """
    kinds = (MalformedJson, KeyError, TypeError, ValueError, AttributeError, UserError)
    with reported("not a bundle", place, _REMEDY, *kinds):
        read = parse_object(data, max_bytes=MAX_BYTES)
        if read["format"] != FORMAT:
            raise MalformedJson(f"of format {read['format']!r}, not {FORMAT}")
        bundle = Bundle(
            group=str(read["group"]),
            roles=tuple(map(str, read["roles"])),
            spec=parse_resolved(canonical_json(read["spec"]), place=place),
            roles_document=str(read["roles.json"]).encode(),
            keys={str(name): str(secret) for name, secret in read["keys"].items()},
            workers={str(name): str(key) for name, key in read["workers"].items()},
        )
        for secret in bundle.keys.values():
            SigningKey.from_secret(secret)
        islands = map(role_names.island_role, island_names(bundle.spec))  # their keys' names
        known = {TRUNK_GROUP, *role_names.role_names(bundle.spec), *islands}
        strangers = {*bundle.roles, *bundle.keys} - known
        if strangers:
            raise MalformedJson(f"its spec has no role {', '.join(sorted(strangers))}")
        if bundle.spec.identity.root_public_key is None or bundle.spec.placement.base_port is None:
            raise MalformedJson("its spec pins no root, or fixes no addresses")
    remedy = "`runspec prepare` the site again, and bring the new bundle"
    with reported("the roles.json in it does not count", place, remedy, BadSignature):
        root = bundle.root_public_key
        open_roles(bundle.roles_document, root_public_key=root, run=bundle.spec.name)
    return bundle


def load_bundle(path: Path) -> Bundle:
    """Reads a bundle's file.

    Raises:
        UserError: there is none, or as `decode_bundle`.
    """
    with (
        reported("cannot read the bundle", path, _REMEDY, OSError),
        reported("not a bundle", path, _REMEDY, UserError),
    ):
        data = read_bounded(path, MAX_BYTES)
    return decode_bundle(data, place=str(path))


def make_bundles(spec: RunSpec, identity: Identity) -> list[Bundle]:
    """One for the trunk, and one for each other process of a run.

    Args:
        spec: `site_spec`'s: it pins the root, and fixes the addresses.
        identity: with the keys of every role.

    Raises:
        UserError: a key is missing.
    """
    roles = identity.roles_file.read_bytes()

    def bundle(name: str, *signers: str, names: tuple[str, ...] = ()) -> Bundle:
        keys = {signer: SigningKey.load(identity.key(signer)).secret_hex for signer in signers}
        workers = read_own_workers(identity.folder) if name == TRUNK_GROUP else {}
        return Bundle(name, names or (name,), spec, roles, keys, workers)

    trunk = (TRUNK_GROUP, *role_names.trunk_names(spec))
    first, islands = map(role_names.island_role, island_names(spec)[:1]), []
    for name, (speaker, *others) in role_names.island_processes(spec).items():
        both = (speaker, role_names.shares_name(name))
        islands.append(bundle(speaker, role_names.island_role(name), names=both))
        islands += [bundle(other) for other in others]
    without_key = (*role_names.learner_names(spec)[1:], *role_names.relay_names(spec))
    # The keys of these have their own names.
    with_key = [*role_names.validator_names(spec), *role_names.evaluator_names(spec)]
    with_key += role_names.worker_names(spec)
    return [
        bundle(TRUNK_GROUP, "coordinator", "publisher", *first, names=trunk),
        *islands,
        *map(bundle, without_key),
        *(bundle(name, name) for name in with_key),
    ]


def require_own(bundle: Bundle, folder: Path) -> None:
    """Refuses a folder of another run; a new one will do.

    Raises:
        UserError: the folder holds another run's spec or keys.
    """
    others = dict[Path, str]()
    if (path := folder / SPEC_FILE).exists():
        spec, run = load_resolved(folder), (bundle.spec.name, bundle.root_public_key)
        if (spec.name, spec.identity.root_public_key) != run:
            others[path] = f"the spec of another run, {spec.name}"
    for name, secret in bundle.keys.items():
        path = folder / "keys" / f"{name}.key"
        if path.exists() and SigningKey.load(path).secret_hex != secret:
            others[path] = "another key than the bundle's"
    for path, thing in others.items():
        remedy = "name another --dir, or remove the folder if its run is over"
        raise UserError(f"{thing}, lies here", place=str(path), remedy=remedy)


def install(bundle: Bundle, folder: Path) -> None:
    """Lays out a folder as a run directory, with what the bundle has of one.

    The trunk's gets no spec: its supervisor compares the bundle's with the run's own.

    Raises:
        UserError: as `require_own`, or the folder cannot be written.
    """
    require_own(bundle, folder)
    keys = folder / "keys"
    require_writable(keys, "the role's folder", "mend the permissions, or name another --dir")
    keys.chmod(0o700)
    for name, secret in bundle.keys.items():
        if not (keys / f"{name}.key").exists():
            SigningKey.from_secret(secret).save(keys / f"{name}.key")
    if bundle.group == TRUNK_GROUP:
        write_atomic(keys / "roles.json", bundle.roles_document)
        write_atomic(keys / OWN_WORKERS_FILE, canonical_json(dict(bundle.workers)))
    else:
        write_spec(bundle.spec, folder, bundle.roles)


def install_role(
    bundle: Bundle, folder: Path, endpoints: Endpoints, *, lock: int = -1, listen: str | None = None
) -> PreparedRun:
    """Lays out a folder from which one role of a bundle starts; returns what it is of the run.

    Args:
        bundle: names the role.
        folder: the role's own, or the run directory.
        endpoints: where the run's servers are reached.
        lock: of the folder.
        listen: HOST:PORT of a server that listens elsewhere.

    Raises:
        UserError: as `install`.
    """
    install(bundle, folder)
    save_endpoints(folder, endpoints)
    identity = Identity(folder / "keys", bundle.root_public_key)
    return PreparedRun(bundle.spec, folder, endpoints, identity, this_machine(), lock, listen)
