"""Processes of a prepared run: a pure function from its spec to command lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.process import Endpoints, Role, load_endpoints
from runspec.core.schema import Learner, RunSpec, role_names
from runspec.core.schema.load import load_resolved
from runspec.core.schema.role_names import evaluator_pool, island_spec
from runspec.local.fleet import NEEDED, RestartPolicy
from runspec.local.identity import Identity, make_identity
from runspec.local.machine import (
    TPU_HOSTS,
    Machine,
    assign_cores,
    assign_devices,
    jax_environment,
    this_machine,
    thread_limits,
    visible_devices,
    vllm_environment,
)


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
    listen: str | None = None
    """HOST:PORT where a server that is started alone listens, if not at its endpoint."""

    @classmethod
    def inherited(cls, directory: Path, lock: int) -> PreparedRun:
        """The run that another process prepared, and handed over with its lock.

        Raises:
            UserError: a file of the run cannot be read.
        """
        spec, endpoints = load_resolved(directory), load_endpoints(directory)
        assert endpoints is not None, "written before the lock is handed over"
        return cls(spec, directory, endpoints, make_identity(directory, spec), this_machine(), lock)

    def role(self, name: str) -> Role:
        """The role of a name, as its process finds it."""
        return Role(name, self.directory, self.spec, self.endpoints, self.listen)

    def command(self, name: str) -> tuple[str, ...]:
        """The command line of a role."""
        listen = () if self.listen is None else ("--listen", self.listen)
        return self.machine.module("runspec.role", name, str(self.directory), *listen)

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
    policy: RestartPolicy = NEEDED
    """What its end means."""


def first_version_role(run: PreparedRun) -> RoleSpec:
    """The stage before the run: makes version 0, or finds a warm start in the cache.

    One process makes it, on the learner's whole mesh. One host cannot open the slice of several, so
    it is on the CPU where they are several, and where the weights are drawn alone.
    """
    drawn, learner = run.spec.supervised is not None, run.spec.learner
    name = role_names.DRAWN if drawn else role_names.WARM_START
    if drawn or learner.hosts > 1:
        devices = 1 if drawn else learner.mesh.devices
        env = thread_limits(()) | jax_environment(run.machine.env, on_cpu=True, devices=devices)
    else:
        numbers = assign_devices(run.spec, roles_here(run.spec)).get("learner")
        env = _learner_env(run, learner, (), numbers)
    return RoleSpec(name, run.command(name), env, policy=RestartPolicy(ends_run=True))


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
    spec, names = run.spec, role_names.role_names(run.spec)
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(
                f"{count} roles would be called {name}",
                place="samplers",
                remedy="give the pool another name",
            )
    here = roles_here(spec) if here is None else here
    kinds = role_names.role_kinds(spec)
    if cores is None:
        busy = [name for name in names if name in here and kinds[name] in ("learner", "worker")]
        islands = bool(role_names.island_processes(spec))
        others = len(busy) < len(here)
        cores = assign_cores(busy, run.machine.cores, others=others, evenly=islands)
    assigned, secrets = assign_devices(spec, here), secret_values(spec, run.machine)
    roles = []
    for name in (name for name in names if name in here):
        mine, devices = cores.get(name, ()), assigned.get(name)
        policy = _policy(spec, name, kinds[name])
        listen = run.role(name).address if policy.server else None
        env = {**_environment(run, name, kinds[name], mine, devices), **secrets}
        roles.append(RoleSpec(name, run.command(name), env, mine, listen, policy))
    return roles


def roles_here(spec: RunSpec) -> set[str]:
    """Return the processes that one machine starts."""
    return set(role_names.role_names(spec)) - role_names.elsewhere(spec)


def _policy(spec: RunSpec, name: str, kind: str) -> RestartPolicy:
    match kind:
        case "origin" | "relay" | "coordinator":
            return RestartPolicy(server=True)
        case "shares":
            first = role_names.shares_name(role_names.island_names(spec)[0])
            return RestartPolicy(may_fail=name != first, server=True)
        case "learner":
            ends = name == "learner"
            others = name not in role_names.learner_names(spec)
            return RestartPolicy(ends_run=ends, ends_when_sampled=not ends, may_fail=others)
        case "validator" | "worker":
            return RestartPolicy(ends_when_sampled=True)
        case "evaluator":
            return RestartPolicy(may_fail=True, late_s=spec.evaluator.deadline)
        case "monitor":
            each = spec.monitors[role_names.monitor_names(spec).index(name)]
            return RestartPolicy(may_fail=True, onlooker=True, late_s=each.deadline)
    return NEEDED


def _environment(
    run: PreparedRun, name: str, kind: str, cores: tuple[int, ...], devices: Sequence[int] | None
) -> dict[str, str]:
    """Return what a role has besides the supervisor's own environment."""
    spec, machine_env = run.spec, run.machine.env
    match kind:
        case "learner":
            island, names, _ = run.role(name).program()
            learner = spec.learner if island is None else island_spec(spec, island).learner
            env = _learner_env(run, learner, cores, devices)
            if TPU_HOSTS in machine_env:  # whatever else the cluster calls this host
                env["TPU_WORKER_HOSTNAMES"] = machine_env[TPU_HOSTS]
                env["TPU_WORKER_ID"] = str(names.index(name))
            return env
        case "validator":
            hardware = (spec.verify.hardware or spec.learner.hardware).kind
            env = jax_environment(machine_env, on_cpu=hardware == "cpu", devices=1)
            return thread_limits(()) | env | visible_devices(hardware, devices)
        case "evaluator" | "worker":
            pools = {pool.name: pool for pool in spec.samplers}
            pool = evaluator_pool(spec) if kind == "evaluator" else pools[run.role(name).pool]
            hardware, tensor = pool.hardware.kind, pool.parallel.tensor
            env = vllm_environment(cores, on_cpu=hardware == "cpu", tensor=tensor)
            return thread_limits(cores) | env | visible_devices(hardware, devices)
    return thread_limits(())


def secret_values(spec: RunSpec, machine: Machine) -> dict[str, str]:
    """Values of the spec's secrets that the machine's environment has, by name."""
    sources = {secret.name: secret.source.env for secret in spec.secrets}
    return {name: machine.env[source] for name, source in sources.items() if source in machine.env}


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
