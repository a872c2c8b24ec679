"""Roles of a spec: names of their processes, its islands, and the evaluator's engine.

The names are those of `status`, logs, keys and `placement.devices`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import ceil

from runspec.core.schema import IslandMember, RunSpec, SamplerPool

TRUNK = ("origin", "coordinator", "publisher", "learner")
"""Names of the processes that share the run directory; `trunk_names` has the islands' too."""
WARM_START, DRAWN = "warm-start", "initial-model"
EVALUATOR = "evaluator"
"""Name of the evaluator's process and key."""
STAGES = (WARM_START, DRAWN)
"""Names of the processes that may make version 0, before the others start."""


def learner_names(spec: RunSpec) -> list[str]:
    """Return the names of the learner's processes; `learner` is the first."""
    return ["learner", *(f"learner-{i}" for i in range(1, spec.learner.hosts))]


def trunk_names(spec: RunSpec) -> list[str]:
    """Return the processes that share the run directory."""
    shares = (shares_name(name) for name in island_names(spec)[:1])
    return [*TRUNK, *shares, *monitor_names(spec)]


def island_role(name: str) -> str:
    """Return the name of an island's key, and of its process or group of processes.

    The processes of the first island are the learner's.
    """
    return f"island-{name}"


def shares_name(name: str) -> str:
    """Return the name of the process that serves an island's shares."""
    return f"shares-{name}"


def island_processes(spec: RunSpec) -> dict[str, list[str]]:
    """Return the training processes of each island after the first, by the island's name."""
    found = {}
    for member in members(spec)[1:]:
        role, hosts = island_role(member.name), member.hosts or spec.learner.hosts
        found[member.name] = [role] if hosts == 1 else [f"{role}-{i}" for i in range(hosts)]
    return found


def relay_names(spec: RunSpec) -> list[str]:
    return [f"relay-{relay.name}" for relay in spec.broadcast.relays]


def rendezvous_names(spec: RunSpec) -> list[str]:
    """Return the processes at whose address the processes of one program find each other."""
    several = ["learner"] if spec.learner.hosts > 1 else []
    return [*several, *(each[0] for each in island_processes(spec).values() if len(each) > 1)]


def server_names(spec: RunSpec) -> list[str]:
    """Return the roles that listen, in the order of their ports from `placement.base_port` on."""
    shares = [shares_name(name) for name in island_names(spec)]
    return ["coordinator", "origin", *relay_names(spec), *rendezvous_names(spec), *shares]


def measured_roles(spec: RunSpec) -> dict[str, str]:
    """Return the processes that `placement.metrics` gives a port, in their order, and their role.

    The trunk's are first. Of a program of several processes the first speaks.
    """
    measured = ("publisher", "learner", "validator", "evaluator", "worker")
    others = {name for names in programs(spec).values() for name in names[1:]}
    return {name: kind for name, kind in _roles(spec) if kind in measured and name not in others}


def validator_names(spec: RunSpec) -> list[str]:
    return [f"validator-{i}" for i in range(spec.verify.validators)]


def evaluator_names(spec: RunSpec) -> list[str]:
    return [EVALUATOR] if spec.evaluations else []


def monitor_names(spec: RunSpec) -> list[str]:
    return [f"monitor-{monitor.name}" for monitor in spec.monitors]


def worker_names(spec: RunSpec) -> dict[str, str]:
    """Return the pool of each worker, in the order of the spec."""
    return {f"{pool.name}-{i}": pool.name for pool in spec.samplers for i in range(pool.replicas)}


def role_names(spec: RunSpec) -> list[str]:
    """Return every long-running process on any machine; a name that clashes appears twice."""
    return [name for name, _ in _roles(spec)]


def role_kinds(spec: RunSpec) -> dict[str, str]:
    """Return what each long-running process does, in the order of `role_names`."""
    return dict(_roles(spec))


def _roles(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield each process with its kind."""
    islands = chain(*island_processes(spec).values())
    for kind, names in (
        ("origin", ["origin"]),
        ("relay", relay_names(spec)),
        ("coordinator", ["coordinator"]),
        ("publisher", ["publisher"]),
        ("learner", [*learner_names(spec), *islands]),
        ("shares", map(shares_name, island_names(spec))),
        ("validator", validator_names(spec)),
        ("evaluator", evaluator_names(spec)),
        ("monitor", monitor_names(spec)),
        ("worker", (f"{pool.name}-{i}" for pool in spec.samplers for i in range(pool.replicas))),
    ):
        yield from ((name, kind) for name in names)


def programs(spec: RunSpec) -> dict[str | None, list[str]]:
    """Return the processes of each training program by its island, the learner's first.

    The learner of a run without islands has None for one.
    """
    found: dict[str | None, list[str]] = {next(iter(island_names(spec)), None): learner_names(spec)}
    found.update(island_processes(spec))
    return found


def placeable(spec: RunSpec) -> dict[str, list[str]]:
    """Return the groups that `placement.roles` may name, with their processes.

    All other processes always start on this machine.
    """
    groups = {"learners": learner_names(spec)[1:]} if spec.learner.hosts > 1 else {}
    for name, processes in island_processes(spec).items():
        groups[island_role(name)] = [*processes, shares_name(name)]
    groups["validators"] = validator_names(spec)
    groups |= {name: [name] for name in (*relay_names(spec), *evaluator_names(spec))}
    for worker, pool in worker_names(spec).items():
        groups.setdefault(pool, []).append(worker)
    return groups


def elsewhere(spec: RunSpec) -> frozenset[str]:
    """Return the processes that `placement.roles` leaves to other machines."""
    here = spec.placement.roles
    if here is None:
        return frozenset()
    groups = placeable(spec).items()
    return frozenset(name for group, names in groups if group not in here for name in names)


def members(spec: RunSpec) -> list[IslandMember]:
    """Return the islands in the order of the spec; empty if the learner is one program."""
    return [] if spec.learner.islands is None else spec.learner.islands.members


def island_names(spec: RunSpec) -> list[str]:
    """Return the islands' names in the order of the spec; the first is the trunk's.

    Empty if the learner is one program.
    """
    return [member.name for member in members(spec)]


def step_overlap(spec: RunSpec) -> int:
    """Return the steps by which training runs ahead of its newest version: 0 or 1."""
    return 0 if spec.learner.islands is None else spec.learner.islands.overlap


def island_spec(spec: RunSpec, name: str) -> RunSpec:
    """Return the spec by which one island trains, as if it were the only learner.

    It has the island's hardware, mesh, hosts and rows, its part of `tokens_per_update` or of
    `prompts_per_step` (rounded up), and no islands. A spec without islands is returned as it is.

    Args:
        spec: a resolved spec.
        name: name of the island.

    Raises:
        KeyError: the spec has islands, and none of this name.
    """
    found = {member.name: member for member in members(spec)}
    if not found:
        return spec
    member, learner = found[name], spec.learner
    packing = learner.packing.model_copy(update={"rows": member.rows or learner.packing.rows})
    own = learner.model_copy(
        update={
            "hardware": member.hardware or learner.hardware,
            "mesh": member.mesh or learner.mesh,
            "hosts": member.hosts or learner.hosts,
            "packing": packing,
            "islands": None,
        }
    )
    if spec.supervised is None:
        part = {"prompts_per_step": ceil(spec.grpo.prompts_per_step / len(found))}
    else:
        part = {"tokens_per_update": spec.supervised.tokens_per_update // len(found)}
    algorithm = spec.algorithm.model_copy(update=part)
    return spec.model_copy(update={"learner": own, "algorithm": algorithm})


def evaluator_pool(spec: RunSpec) -> SamplerPool:
    """Return the settings of the evaluator's engine: those of its pool, on its own hardware."""
    own = spec.evaluator
    pool = next((p for p in spec.samplers if p.name == own.pool), spec.samplers[0])
    given = {"hardware": own.hardware, "parallel": own.parallel}
    changes = {name: value for name, value in given.items() if value is not None}
    # A version is loaded when nothing is sampled.
    return pool.model_copy(update={**changes, "in_flight_updates": False})
