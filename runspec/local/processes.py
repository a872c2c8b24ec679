"""Processes of a prepared run: a pure function from its spec to command lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from runspec.core.address import is_loopback
from runspec.core.errors import UserError
from runspec.core.run_files import island_folder
from runspec.core.schema import Learner, RunSpec, SamplerPool, role_names
from runspec.core.schema.load import load_resolved
from runspec.core.schema.role_names import evaluator_pool, island_names, island_spec
from runspec.local.endpoints import Endpoints, address, load_endpoints
from runspec.local.identity import Identity, make_identity
from runspec.local.machine import (
    Machine,
    assign_cores,
    assign_devices,
    jax_environment,
    this_machine,
    thread_limits,
    visible_devices,
    vllm_environment,
)

HEARTBEAT_S = 10
"""Silence that ends the other processes of a learner on one machine, where no network is slow."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that can start: its directory has everything that this machine's roles need."""

    spec: RunSpec
    directory: Path
    endpoints: Endpoints
    """Where its servers listen."""
    identity: Identity
    """Its keys."""
    machine: Machine
    """The machine that starts its roles."""
    lock: int
    """File descriptor: whoever has it open holds the directory."""

    @classmethod
    def inherited(cls, directory: Path, lock: int) -> PreparedRun:
        """The run that another process prepared, and handed over with its lock.

        Raises:
            UserError: a file of the run cannot be read.
        """
        spec, endpoints = load_resolved(directory), load_endpoints(directory)
        assert endpoints is not None, "written before the lock is handed over"
        return cls(spec, directory, endpoints, make_identity(directory, spec), this_machine(), lock)

    def changed(self, spec: RunSpec) -> PreparedRun:
        """The run under another spec, with the keys that it asks for.

        Raises:
            UserError: as `make_identity`.
        """
        return replace(self, spec=spec, identity=make_identity(self.directory, spec))


@dataclass(frozen=True)
class RoleSpec:
    """One process to keep alive."""

    name: str
    """Names its log, its key and its line in `status`."""
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own environment."""
    cores: tuple[int, ...] = ()
    """Cores it is pinned to; empty leaves it unpinned."""
    listen: tuple[str, int] | None = None
    """Where it serves: it is running once this answers. Others are once they have logged a line."""
    ends_run: bool = False
    """Its exit 0 ends the run."""
    ends_when_sampled: bool = False
    """Its exit 0 is no death once every step of the run has its rollouts."""
    may_fail: bool = False
    """However often it dies, the run goes on: it can do without it for a time."""
    late_s: float | None = None
    """How long a trained run waits for its exit 0; None: as for all others."""


def first_version_role(run: PreparedRun, cache: Path) -> RoleSpec:
    """The stage before the run: makes version 0, or finds a warm start in the cache."""
    command: tuple[str, ...] = ("learner_jax", "draw", str(run.directory))
    if run.spec.supervised is None:
        command = ("learner_jax", "warm-start", str(run.directory), "--cache", str(cache))
    devices = assign_devices(run.spec, roles_here(run.spec)).get("learner")
    # One process makes the version, on the whole mesh.
    learner = run.spec.learner.model_copy(update={"hosts": 1})
    env = _learner_env(run, learner, (), devices)
    name = role_names.WARM_START if run.spec.supervised is None else role_names.DRAWN
    return RoleSpec(name, run.machine.module(*command), env, ends_run=True)


def role_specs(
    run: PreparedRun,
    here: Collection[str] | None = None,
    cores: Mapping[str, tuple[int, ...]] | None = None,
) -> list[RoleSpec]:
    """The roles that this machine starts.

    Each tolerates that the others are not up yet, so order is for reading.

    Args:
        run: names files of this machine.
        here: names of the roles; None: all but those that `placement.roles` leaves to others.
        cores: that roles are pinned to, by name; None: this machine's are shared among the busy.

    Raises:
        UserError: two roles would have one name.
    """
    if here is None:
        here = roles_here(run.spec)
    make = _Roles(run, here, cores)
    roles = [*make.trunk(), *make.training(), *make.shares(), *make.validators()]
    roles += [*make.evaluator(), *make.monitors(), *make.workers()]
    for name, count in Counter(role.name for role in roles).items():
        if count > 1:
            raise UserError(
                f"{count} roles would be called {name}",
                place="samplers",
                remedy="give the pool another name",
            )
    secrets, figures = secret_values(run.spec, run.machine), run.endpoints.figures_option
    own = [replace(each, command=(*each.command, *figures(each.name))) for each in roles]
    return [replace(each, env={**each.env, **secrets}) for each in own if each.name in here]


def roles_here(spec: RunSpec) -> set[str]:
    """Return the processes that one machine starts."""
    return set(role_names.role_names(spec)) - role_names.elsewhere(spec)


class _Roles:
    """Makes the roles of one run."""

    def __init__(
        self, run: PreparedRun, here: Collection[str], cores: Mapping[str, tuple[int, ...]] | None
    ) -> None:
        self._run, self._spec, self._here = run, run.spec, here
        self._endpoints, self._module = run.endpoints, run.machine.module
        self._listening = run.endpoints.all()
        self._relays = run.endpoints.relays | run.endpoints.elsewhere
        self._root = ("--public-key", run.identity.root_public_key)
        if cores is None:
            islands = [*chain(*role_names.island_processes(run.spec).values())]
            names = [*role_names.learner_names(run.spec), *islands]
            names += role_names.worker_names(run.spec)
            busy = [name for name in names if name in here]
            others, evenly = len(busy) < len(here), bool(islands)
            cores = assign_cores(busy, run.machine.cores, others=others, evenly=evenly)
        self._cores = cores
        self._assigned = assign_devices(run.spec, here)

    def trunk(self) -> Iterator[RoleSpec]:
        """Origin, relays, coordinator and publisher."""
        folder, ends = self._run.directory, self._endpoints
        yield from self._server("origin", "broadcast", "origin", str(folder / "store" / "origin"))
        for relay in self._spec.broadcast.relays:
            name = f"relay-{relay.name}"
            if name in self._listening:
                yield from self._server(
                    name,
                    *("broadcast", "relay", "--run", self._spec.name),
                    *_each(
                        "--upstream", (self._relays.get(up, ends.origin) for up in relay.upstream)
                    ),
                    *("--keep-versions", str(self._spec.broadcast.keep_versions)),
                    *("--store", str(folder / "store" / name), *self._root),
                )
        weights = (*_each("--public-weights", ends.weights()), "--weights", ends.origin)
        command = ("verify", "coordinator", str(folder), *weights, *self._root)
        yield from self._server("coordinator", *command)
        yield RoleSpec(
            "publisher", self._module("bridge", "publish", str(folder)), thread_limits(())
        )

    def training(self) -> Iterator[RoleSpec]:
        """The learner's processes, and those of the islands; the first one is the learner."""
        run, ends, machine_env = self._run, self._endpoints, self._run.machine.env
        first = next(iter(island_names(self._spec)), None)
        programs: list[tuple[str | None, list[str]]]
        programs = [(first, role_names.learner_names(self._spec))]
        programs += role_names.island_processes(self._spec).items()
        for turn, (island, names) in enumerate(programs):
            folder, join, fetching = run.directory, ends.learner, tuple[str, ...]()
            learner = self._spec.learner
            if island is not None:
                learner = island_spec(self._spec, island).learner
            if island is not None and turn > 0:
                folder = island_folder(run.directory, role_names.island_role(island))
                join = ends.islands.get(names[0])
                fetching = (*_each("--weights", self._weights(turn - 1)), *self._root)
            for i, name in enumerate(names):
                if name not in self._here:
                    continue
                options: list[str] = []
                if join is not None:  # where the processes of a program find each other
                    host, port = address(join)
                    options += ("--coordinator", f"{host}:{port}", "--process", str(i))
                    options += ("--heartbeat", str(HEARTBEAT_S)) if is_loopback(host) else ()
                if island is not None:
                    options += ("--island", island)
                if island is not None and i == 0:  # it exchanges shares with the others
                    key = run.identity.key(role_names.island_role(island))
                    options += ("--coordinator-url", ends.coordinator, "--key", str(key))
                    options += ("--share-url", ends.shares_url(island))
                    options += ("--share-store", str(self._store(island)), *fetching)
                mine = self._cores.get(name, ())
                env = _learner_env(run, learner, mine, self._assigned.get(name))
                if "TPU_WORKER_HOSTNAMES" in machine_env and "TPU_WORKER_ID" not in machine_env:
                    env["TPU_WORKER_ID"] = str(i)  # which of the hosts that a backend names
                yield RoleSpec(
                    name,
                    self._module("learner_jax", "train", str(folder), *options),
                    env,
                    cores=mine,
                    ends_run=name == "learner",
                    ends_when_sampled=name != "learner",
                    may_fail=turn > 0,
                )

    def shares(self) -> Iterator[RoleSpec]:
        """The servers of the islands' shares."""
        for i, island in enumerate(island_names(self._spec)):
            command = ("broadcast", "origin", str(self._store(island)))
            for role in self._server(role_names.shares_name(island), *command):
                yield replace(role, may_fail=i > 0)

    def _store(self, island: str) -> Path:
        return self._run.directory / "store" / role_names.shares_name(island)

    def validators(self) -> Iterator[RoleSpec]:
        kind = (self._spec.verify.hardware or self._spec.learner.hardware).kind
        env = jax_environment(self._run.machine.env, on_cpu=kind == "cpu", devices=1)
        for i, name in enumerate(role_names.validator_names(self._spec)):
            yield RoleSpec(
                name,
                self._module("verify", "validator", *self._work(name, self._weights(i))),
                thread_limits(()) | env | visible_devices(kind, self._assigned.get(name)),
                ends_when_sampled=True,
            )

    def evaluator(self) -> Iterator[RoleSpec]:
        for name in role_names.evaluator_names(self._spec):
            command = ("sampler", "evaluate", *self._work(name, self._weights(0)))
            role = self._sampling(name, evaluator_pool(self._spec), *command)
            yield replace(role, may_fail=True, late_s=self._spec.evaluator.deadline)

    def monitors(self) -> Iterator[RoleSpec]:
        names = role_names.monitor_names(self._spec)
        for name, each in zip(names, self._spec.monitors, strict=True):
            command = self._module("runspec", "monitor", str(self._run.directory), each.name)
            yield RoleSpec(name, command, thread_limits(()), may_fail=True, late_s=each.deadline)

    def workers(self) -> Iterator[RoleSpec]:
        pools = {pool.name: pool for pool in self._spec.samplers}
        for i, (name, pool_name) in enumerate(role_names.worker_names(self._spec).items()):
            work = self._work(name, self._weights(i, pools[pool_name].relays))
            command = ("sampler", "work", *work, "--pool", pool_name)
            yield replace(self._sampling(name, pools[pool_name], *command), ends_when_sampled=True)

    def _sampling(self, name: str, pool: SamplerPool, *command: str) -> RoleSpec:
        """A role with an engine."""
        mine, kind = self._cores.get(name, ()), pool.hardware.kind
        engine = vllm_environment(mine, on_cpu=kind == "cpu", tensor=pool.parallel.tensor)
        env = thread_limits(mine) | engine | visible_devices(kind, self._assigned.get(name))
        return RoleSpec(name, self._module(*command), env, cores=mine)

    def _server(self, name: str, *command: str) -> Iterator[RoleSpec]:
        """The server, where it is started here: one elsewhere may have a URL that is no address."""
        if name in self._here:
            host, port = address(self._listening[name])
            module = self._module(*command, "--listen", f"{host}:{port}")
            yield RoleSpec(name, module, thread_limits(()), listen=(host, port))

    def _work(self, name: str, weights: Sequence[str]) -> tuple[str, ...]:
        """Return the arguments that validators and samplers share."""
        return (
            *("--run", self._spec.name, "--coordinator", self._endpoints.coordinator),
            *_each("--weights", weights),
            *self._root,
            *("--key", str(self._run.identity.key(name))),
            *("--dir", str(self._run.directory / "work" / name)),
        )

    def _weights(self, index: int, named: Sequence[str] | None = None) -> list[str]:
        """The relays that a pool names, best first; else all, another one first for each worker.
        The origin comes last, for when none answers."""
        if named is None:
            known = list(self._relays)
            turn = index % len(known) if known else 0
            named = [*known[turn:], *known[:turn]]
        urls = [self._relays[name] for name in named if name in self._relays]
        return [*urls, self._endpoints.origin]


def secret_values(spec: RunSpec, machine: Machine) -> dict[str, str]:
    """Values of the spec's secrets that the machine's environment has, by name."""
    sources = {secret.name: secret.source.env for secret in spec.secrets}
    return {name: machine.env[source] for name, source in sources.items() if source in machine.env}


def _each(option: str, values: Iterable[str]) -> Iterator[str]:
    """Yield an option before each value."""
    for value in values:
        yield from (option, value)


def _learner_env(
    run: PreparedRun, learner: Learner, cores: tuple[int, ...], numbers: Sequence[int] | None
) -> dict[str, str]:
    """Environment of one of a learner's processes, which sees these accelerators."""
    kind, devices = learner.hardware.kind, learner.mesh.devices // learner.hosts
    return (
        thread_limits(cores)
        | jax_environment(run.machine.env, on_cpu=kind == "cpu", devices=devices)
        | visible_devices(kind, numbers)
    )
