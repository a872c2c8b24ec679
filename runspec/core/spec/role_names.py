"""What the processes of a run are called: in `status`, in logs, keys and `placement.devices`."""

from __future__ import annotations

from runspec.core.spec.schema import RunSpec

TRUNK = ("origin", "coordinator", "publisher", "learner")
"""Processes that share the run directory. `learner` is the first process of the learner."""


def learner_names(spec: RunSpec) -> list[str]:
    """`learner` is the first process of the learner."""
    return ["learner", *(f"learner-{i}" for i in range(1, spec.learner.hosts))]


def relay_names(spec: RunSpec) -> list[str]:
    return [f"relay-{relay.name}" for relay in spec.broadcast.relays]


def server_names(spec: RunSpec) -> list[str]:
    """Roles that listen, in the order of their ports from `placement.base_port` on."""
    several = ["learner"] if spec.learner.hosts > 1 else []
    return ["coordinator", "origin", *relay_names(spec), *several]


def validator_names(spec: RunSpec) -> list[str]:
    return [f"validator-{i}" for i in range(spec.verify.validators)]


def worker_names(spec: RunSpec) -> dict[str, str]:
    """Pool by worker, in the order of the spec."""
    return {f"{pool.name}-{i}": pool.name for pool in spec.samplers for i in range(pool.replicas)}


def role_names(spec: RunSpec) -> list[str]:
    """Every process that stays up, on whatever machine; names that clash are there twice."""
    return [
        *("origin", *relay_names(spec), "coordinator", "publisher"),
        *(*learner_names(spec), *validator_names(spec)),
        *(f"{pool.name}-{i}" for pool in spec.samplers for i in range(pool.replicas)),
    ]


def placeable(spec: RunSpec) -> dict[str, list[str]]:
    """What `placement.roles` may name, each with its processes; the others are always started."""
    groups = {"learners": learner_names(spec)[1:]} if spec.learner.hosts > 1 else {}
    groups["validators"] = validator_names(spec)
    groups |= {name: [name] for name in relay_names(spec)}
    for worker, pool in worker_names(spec).items():
        groups.setdefault(pool, []).append(worker)
    return groups


def elsewhere(spec: RunSpec) -> frozenset[str]:
    """Processes that `placement.roles` leaves to other machines."""
    here = spec.placement.roles
    if here is None:
        return frozenset()
    groups = placeable(spec).items()
    return frozenset(name for group, names in groups if group not in here for name in names)
