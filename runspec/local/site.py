"""A site: the role groups of a run that several machines share, and the folder of its bundles.

Each member of a group is started by one command on a machine that has what the group asks for:

    runspec role MEMBER --bundle MEMBER.json

The trunk's member supervises the coordinator, the publisher, the origin and the learner's process
0, which share the run directory. Everybody else needs HTTP and a folder of its own; the learner's
other processes need `checkpoints.dir` besides. An island's first process and the server of its
shares have one bundle and one folder. No group has to wait for another before it starts:
a role tries again until its servers answer, and says for whom it waits.

A bundle is what one member is given before its processes start, and nothing more:

    {"format": 1, "group": "validator-0", "roles": ["validator-0"], "spec": {...},
     "roles.json": "...", "keys": {"validator-0": SECRET}, "workers": {}}

or, in place of spec and roles.json, `"shared": true`: they are files in the folder `run` beside it.

It is a file of JSON, readable by its owner alone. The trunk's names the processes that share the
run directory, and the public keys of the run's own workers; every other names one process. The spec
is resolved, pins the root's public key and fixes every address. Of private keys a bundle has those
of its own processes. An island's first bundle names the server of its shares too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError, reported
from runspec.core.files import read_bounded, require_writable, write_atomic
from runspec.core.models import device_count
from runspec.core.process import Endpoints, save_endpoints
from runspec.core.roles import OWN_WORKERS_FILE, open_roles, read_own_workers
from runspec.core.schema import Hardware, Learner, RunSpec, role_names
from runspec.core.schema.load import FILE_NAME as SPEC_FILE
from runspec.core.schema.load import MAX_BYTES as MAX_SPEC_BYTES
from runspec.core.schema.load import dump_resolved, load_resolved, parse_resolved
from runspec.core.schema.role_names import evaluator_pool, island_names, island_spec
from runspec.core.signed import BadSignature, SigningKey
from runspec.local.identity import Identity, make_identity
from runspec.local.machine import this_machine
from runspec.local.processes import PreparedRun
from runspec.local.run_dir import LOCK_FILE, write_spec

BASE_PORT = 29400
"""First port of a site whose spec names none."""
METRICS_PORT = 29500
"""The same of its roles' figures."""
TRUNK_GROUP = "trunk"
"""The bundle of the processes that share the run directory; as a role, the supervisor of them."""
ANY_MACHINE = "any machine"
BUNDLES = "bundles"


class Disk(StrEnum):
    """The disk that a member needs."""

    RUN = "run directory"
    """Must outlive the process: the run is lost without it."""
    CHECKPOINTS = "checkpoints.dir"
    """Shared by the learner's processes; beside it a folder of its own."""
    OWN = "own folder"
    """Can be lost: what is missing is fetched again."""


@dataclass(frozen=True)
class Group:
    """Processes that are started alike, each on a machine of its own or beside others."""

    name: str
    members: tuple[str, ...]
    """Each has a bundle of its own, which is called like it."""
    hardware: Hardware | None
    """None: no accelerator."""
    devices: int
    """Accelerators of one member; 0 where `hardware` is None or names CPUs."""
    secrets: tuple[str, ...]
    """Environment variables that each member needs and no bundle holds."""
    waits_for: tuple[str, ...] = (TRUNK_GROUP,)
    """Groups whose servers it needs before it can do anything."""
    disk: Disk = Disk.OWN
    restart: str = "alone"
    """How a member that ended with an error is restarted, in words. Learners that share a program
    end by themselves when one is lost, and join anew."""
    beside: tuple[str, ...] = ()
    """Processes that run beside the first member, from its bundle and in its folder."""

    @property
    def machine(self) -> str:
        """The machine that one member needs, in words."""
        if self.hardware is None:
            return ANY_MACHINE
        return f"{self.devices} x {self.hardware.kind}"

    def command(self, member: str, bundles: PurePath, folder: PurePath | None) -> tuple[str, ...]:
        """The command line of a member, or of a process beside the first one.

        Args:
            member: one of the group, or of `beside`.
            bundles: folder of the bundles there.
            folder: the member's own there; None: as `runspec role` chooses.
        """
        where = () if folder is None else ("--dir", str(folder))
        of = self.members[0] if member in self.beside else member
        return ("runspec", "role", member, "--bundle", str(bundles / f"{of}.json"), *where)


def groups_of(spec: RunSpec) -> list[Group]:
    """The role groups of a run, the trunk first."""
    secrets = tuple(secret.source.env for secret in spec.secrets)

    def group(
        name: str, members: Sequence[str], hardware: Hardware | None, devices: int = 0, **rest: Any
    ) -> Group:
        if hardware is not None and hardware.kind == "cpu":
            hardware = None
        count = 0 if hardware is None else devices or device_count(hardware, 1) or 1
        return Group(name, tuple(members), hardware, count, secrets, **rest)

    def training(name: str, members: Sequence[str], learner: Learner, **rest: Any) -> Group:
        share = (device_count(learner.hardware, learner.mesh.slices) or 1) // learner.hosts
        restart = "alone" if learner.hosts == 1 else "with the other learners"
        return group(name, members, learner.hardware, share, restart=restart, **rest)

    learner = spec.learner
    groups = [training(TRUNK_GROUP, [TRUNK_GROUP], learner, disk=Disk.RUN, waits_for=())]
    if learner.hosts > 1:
        others = role_names.learner_names(spec)[1:]
        groups.append(training("learners", others, learner, disk=Disk.CHECKPOINTS))
    for name, processes in role_names.island_processes(spec).items():
        disk = Disk.OWN if len(processes) == 1 else Disk.CHECKPOINTS
        rest: dict[str, Any] = {"disk": disk, "beside": (role_names.shares_name(name),)}
        own = island_spec(spec, name).learner
        groups.append(training(role_names.island_role(name), processes, own, **rest))
    groups += [group(name, [name], None) for name in role_names.relay_names(spec)]
    if spec.verify.validators:
        hardware = spec.verify.hardware or learner.hardware
        groups.append(group("validators", role_names.validator_names(spec), hardware))
    for name in role_names.evaluator_names(spec):
        engine = evaluator_pool(spec)
        groups.append(group(name, [name], engine.hardware, engine.parallel.devices))
    workers = role_names.worker_names(spec)
    for pool in spec.samplers:
        members = [name for name, of in workers.items() if of == pool.name]
        if members:
            groups.append(group(pool.name, members, pool.hardware))
    return groups


def groups_started(spec: RunSpec) -> list[Group]:
    """The role groups that a cluster starts: those of `placement.roles`, and the whole learner."""
    away = role_names.elsewhere(spec) - set(role_names.learner_names(spec))
    return [group for group in groups_of(spec) if not away.intersection(group.members)]


def site_spec(spec: RunSpec, root_public_key: str) -> RunSpec:
    """The spec with what each member must know from the start: the root, and every address.

    Servers without a URL listen on `placement.host` at consecutive ports.
    """
    place, metrics = spec.placement, spec.placement.metrics
    base = BASE_PORT if place.base_port is None else place.base_port
    host = f"[{place.host}]" if ":" in place.host else place.host
    servers = role_names.server_names(spec)
    if metrics is not None and metrics.base_port is None:
        metrics = metrics.model_copy(update={"base_port": METRICS_PORT})
    return with_urls(spec, lambda name: f"http://{host}:{base + servers.index(name)}").model_copy(
        update={
            "identity": spec.identity.model_copy(update={"root_public_key": root_public_key}),
            "placement": place.model_copy(update={"base_port": base, "metrics": metrics}),
        }
    )


def with_urls(spec: RunSpec, at: Callable[[str], str]) -> RunSpec:
    """The spec with a URL for each relay and each island after the first.

    Args:
        spec: its own URLs stay.
        at: gives the URL of a server.
    """
    relays = [
        relay.model_copy(update={"url": relay.url or at(f"relay-{relay.name}")})
        for relay in spec.broadcast.relays
    ]
    update: dict[str, object] = {"broadcast": spec.broadcast.model_copy(update={"relays": relays})}
    if spec.learner.islands is not None:
        first, *others = spec.learner.islands.members
        others = [
            each.model_copy(update={"url": each.url or at(role_names.shares_name(each.name))})
            for each in others
        ]
        islands = spec.learner.islands.model_copy(update={"members": [first, *others]})
        update["learner"] = spec.learner.model_copy(update={"islands": islands})
    return spec.model_copy(update=update)


def make_site(spec: RunSpec, site: Path) -> tuple[RunSpec, list[Bundle]]:
    """Makes a site's keys, spec and bundles in a folder; returns the last two.

    Raises:
        UserError: the folder is a run's or another site's, or cannot be written.
    """
    remedy = "name another folder with -o"
    if (site / LOCK_FILE).exists():
        raise UserError("a run's directory, not a site", place=str(site), remedy=remedy)
    if (site / SPEC_FILE).exists() and (name := load_resolved(site).name) != spec.name:
        raise UserError(f"the site of another run, {name}", place=str(site), remedy=remedy)
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


FORMAT = 1
ROLES_FILE = "roles.json"
SHARED = "run"
"""Folder beside a bundle with spec.json and roles.json, where the bundle has them not."""
MAX_BYTES = 2 * MAX_SPEC_BYTES
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

    def encode(self, *, shared: bool = False) -> bytes:
        """Encode it; if `shared`, without what is in every bundle of the site."""
        common: dict[str, Any] = {"shared": True}
        if not shared:
            spec = parse_object(dump_resolved(self.spec), max_bytes=MAX_SPEC_BYTES)
            common = {"spec": spec, ROLES_FILE: self.roles_document.decode()}
        return canonical_json(
            {
                "format": FORMAT,
                "group": self.group,
                "roles": list(self.roles),
                **common,
                "keys": dict(self.keys),
                "workers": dict(self.workers),
            }
        )


def decode_bundle(data: bytes, *, place: str, folder: Path | None = None) -> Bundle:
    """Reads a bundle.

    Args:
        data: its bytes.
        place: of it, for messages.
        folder: where its file lies; None: it has to be whole.

    Raises:
        UserError: it is none, it is damaged, or the roles.json in it counts no more.
    """
    kinds = (MalformedJson, KeyError, TypeError, ValueError, AttributeError, UserError, OSError)
    with reported("not a bundle", place, _REMEDY, *kinds):
        read = parse_object(data, max_bytes=MAX_BYTES)
        if read["format"] != FORMAT:
            raise MalformedJson(f"of format {read['format']!r}, not {FORMAT}")
        if "shared" in read and folder is not None:
            spec = read_bounded(folder / SHARED / SPEC_FILE, MAX_BYTES)
            roles = read_bounded(folder / SHARED / ROLES_FILE, MAX_BYTES)
        else:
            spec, roles = canonical_json(read["spec"]), str(read[ROLES_FILE]).encode()
        bundle = Bundle(
            group=str(read["group"]),
            roles=tuple(map(str, read["roles"])),
            spec=parse_resolved(spec, place=place),
            roles_document=roles,
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
    return decode_bundle(data, place=str(path), folder=path.parent)


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

    trunk, programs = role_names.trunk_names(spec), role_names.programs(spec).items()
    first = map(role_names.island_role, island_names(spec)[:1])
    islands = {names[0]: name for name, names in programs if name and names[0] != "learner"}
    bundles = [bundle(TRUNK_GROUP, "coordinator", "publisher", *first, names=(TRUNK_GROUP, *trunk))]
    for name, kind in role_names.role_kinds(spec).items():
        if name in islands:
            both = (name, role_names.shares_name(islands[name]))
            bundles.append(bundle(name, role_names.island_role(islands[name]), names=both))
        elif name not in trunk and kind != "shares":
            # The keys of these have their own names.
            own = (name,) if kind in ("validator", "evaluator", "worker") else ()
            bundles.append(bundle(name, *own))
    return bundles


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
