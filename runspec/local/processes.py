"""Which processes a run is made of: a pure function from the spec to command lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from runspec.common.errors import UserError
from runspec.local.cores import assign_cores, jax_environment, thread_limits, vllm_environment
from runspec.local.endpoints import Endpoints, address
from runspec.local.identity import Identity
from runspec.spec.role_names import learner_names, validator_names, worker_names
from runspec.spec.schema import Mesh, RunSpec

HEARTBEAT_S = 10
"""Silence that ends the other processes of a learner: on one machine no network is slow."""


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


def warm_start_role(spec: RunSpec, run_dir: Path, *, cache: Path, machine: Machine) -> RoleSpec:
    """The stage before the run: makes version 0, or finds it in the cache."""
    command = ("learner_jax", "warm-start", str(run_dir), "--cache", str(cache))
    return RoleSpec(
        "warm-start", machine.module(*command), _learner_env(spec, machine, ()), ends_run=True
    )


def role_specs(
    spec: RunSpec, run_dir: Path, *, endpoints: Endpoints, identity: Identity, machine: Machine
) -> list[RoleSpec]:
    """All roles of a run; each tolerates that the others are not up yet, so order is for reading.

    Args:
        spec: the resolved spec.
        run_dir: absolute path of the run directory.
        endpoints: where the servers listen.
        identity: the run's keys.
        machine: the interpreter, cores and environment of this machine.

    Raises:
        UserError: two roles would have one name.
    """
    root = ("--public-key", identity.root_public_key)
    workers = worker_names(spec)
    learners = learner_names(spec)
    cores = assign_cores([*learners, *workers], machine.cores)
    pools = {pool.name: pool for pool in spec.samplers}
    at = endpoints.all()

    def serve(name: str, *command: str) -> RoleSpec:
        host, port = address(at[name])
        listen = ("--listen", f"{host}:{port}")
        return RoleSpec(
            name, machine.module(*command, *listen), thread_limits(()), listen=(host, port)
        )

    def work(name: str, weights: Sequence[str]) -> tuple[str, ...]:
        options = [
            *("--run", spec.name, "--coordinator", endpoints.coordinator),
            *(option for url in weights for option in ("--weights", url)),
            *root,
            *("--key", str(identity.key(name)), "--dir", str(run_dir / "work" / name)),
        ]
        return tuple(options)

    roles = [serve("origin", "broadcast", "origin", str(run_dir / "store" / "origin"))]
    for relay in spec.broadcast.relays:
        upstream = [at.get(f"relay-{name}", endpoints.origin) for name in relay.upstream]
        roles.append(
            serve(
                f"relay-{relay.name}",
                *("broadcast", "relay", "--run", spec.name),
                *(option for url in upstream for option in ("--upstream", url)),
                *("--keep-versions", str(spec.broadcast.keep_versions)),
                *("--store", str(run_dir / "store" / f"relay-{relay.name}"), *root),
            )
        )
    roles += [
        serve(
            "coordinator",
            *("verify", "coordinator", str(run_dir), "--weights", endpoints.origin, *root),
        ),
        RoleSpec(
            "publisher",
            machine.module("learner_jax", "publish", str(run_dir)),
            # It exports from disk and needs no device; two JAX processes on one would fight.
            thread_limits(()) | jax_environment(machine.env, on_cpu=True, devices=1),
        ),
    ]
    for i, name in enumerate(learners):
        mine = cores.get(name, ())
        roles.append(
            RoleSpec(
                name,
                machine.module("learner_jax", "train", str(run_dir), *_joining(endpoints, i)),
                _learner_env(spec, machine, mine, hosts=spec.learner.hosts),
                cores=mine,
                ends_run=i == 0,
                ends_when_sampled=i > 0,
            )
        )
    for i, name in enumerate(validator_names(spec)):
        roles.append(
            RoleSpec(
                name,
                machine.module("verify", "validator", *work(name, _weights(endpoints, i))),
                thread_limits(()) | jax_environment(machine.env, on_cpu=_cpu(spec), devices=1),
                ends_when_sampled=True,
            )
        )
    for i, (name, pool_name) in enumerate(workers.items()):
        pool = pools[pool_name]
        mine = cores.get(name, ())
        command = ("sampler", "work", *work(name, _weights(endpoints, i)), "--pool", pool_name)
        engine = vllm_environment(
            mine, on_cpu=pool.hardware.kind == "cpu", tensor=pool.parallel.tensor
        )
        roles.append(
            RoleSpec(
                name,
                machine.module(*command),
                thread_limits(mine) | engine,
                cores=mine,
                ends_when_sampled=True,
            )
        )
    _refuse_equal_names(roles)
    secrets = {
        secret.name: machine.env[secret.source.env]
        for secret in spec.secrets
        if secret.source.env in machine.env
    }
    return [replace(role, env={**role.env, **secrets}) for role in roles]


@dataclass(frozen=True)
class Machine:
    """What the command lines need to know of this machine."""

    python: str
    cores: tuple[int, ...]
    env: Mapping[str, str]
    """The supervisor's environment."""

    def module(self, *arguments: str) -> tuple[str, ...]:
        """Command line of `python -m MODULE ARGUMENT...`."""
        return (self.python, "-m", *arguments)


def mesh_devices(mesh: Mesh) -> int:
    return mesh.data * mesh.fsdp * mesh.context * mesh.tensor


def _joining(endpoints: Endpoints, process: int) -> tuple[str, ...]:
    """How the processes of a learner find each other; nothing for a single one."""
    if endpoints.learner is None:
        return ()
    host, port = address(endpoints.learner)
    options = ("--coordinator", f"{host}:{port}", "--process", str(process))
    return (*options, "--heartbeat", str(HEARTBEAT_S))


def _learner_env(
    spec: RunSpec, machine: Machine, cores: tuple[int, ...], *, hosts: int = 1
) -> dict[str, str]:
    devices = mesh_devices(spec.learner.mesh) // hosts
    return thread_limits(cores) | jax_environment(machine.env, on_cpu=_cpu(spec), devices=devices)


def _cpu(spec: RunSpec) -> bool:
    return spec.learner.hardware.kind == "cpu"


def _weights(endpoints: Endpoints, index: int) -> list[str]:
    """A relay first, another one for each worker, and the origin for when none answers."""
    relays = list(endpoints.relays.values())
    turn = index % len(relays) if relays else 0
    return [*relays[turn:], *relays[:turn], endpoints.origin]


def _refuse_equal_names(roles: Sequence[RoleSpec]) -> None:
    for name, count in Counter(role.name for role in roles).items():
        if count > 1:
            raise UserError(
                f"{count} roles would be called {name}",
                place="samplers",
                remedy="give the pool another name",
            )
