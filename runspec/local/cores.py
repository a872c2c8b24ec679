"""Which role runs on which cores and accelerators, and how many threads it may start."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence

from runspec.core.models.hardware import device_count, xla_threads
from runspec.core.spec.evaluations import evaluator_pool
from runspec.core.spec.islands import island_spec
from runspec.core.spec.role_names import (
    evaluator_names,
    island_processes,
    validator_names,
    worker_names,
)
from runspec.core.spec.schema import Hardware, RunSpec


def assign_cores(
    busy: Sequence[str], cores: Sequence[int], *, others: bool = True, evenly: bool = False
) -> dict[str, tuple[int, ...]]:
    """Spreads the roles that compute all the time over the cores; the others stay unpinned.

    Three busy processes on two cores slow each other twofold: they move from core to core, with
    cold caches. So the first role (the learner) never shares its core while there are two. Where
    there are plenty, an equal share is left for the roles that are not pinned.

    Args:
        busy: names of the busy roles, the learner first.
        cores: the cores this process may use.
        others: whether roles that are not busy run here too.
        evenly: whether the first role shares its core like the others, where cores are few. Islands
            wait for the slowest of them.

    Returns:
        Cores by role; a role that is not named is not pinned. On one core nothing is.
    """
    if len(cores) < 2 or not busy:
        return {}
    share = max(1, len(cores) // (len(busy) + others))
    if share * len(busy) <= len(cores):
        return {role: tuple(cores[i * share : (i + 1) * share]) for i, role in enumerate(busy)}
    if evenly:
        return {role: (cores[i % len(cores)],) for i, role in enumerate(busy)}
    first, *more = busy
    rest = cores[1:]
    shared = {role: (rest[i % len(rest)],) for i, role in enumerate(more)}
    return {first: (cores[0],), **shared}


def assign_devices(spec: RunSpec, here: Container[str]) -> dict[str, list[int]]:
    """Numbers of the accelerators that each role of one machine sees.

    `placement.devices` says so, and where it does not, learner, islands, validators, evaluator and
    workers in this order take the next free ones: two processes on one TPU chip or GPU both fail. A
    backend that is not `local` says by itself what is free.

    Args:
        spec: of the run.
        here: names of the roles that the machine starts.

    Returns:
        By role. A role that is not named sees all: on a CPU, or the only one on its accelerators.
    """
    learner = spec.learner
    if spec.placement.backend != "local":
        return dict(spec.placement.devices)
    wanted: list[tuple[str, Hardware, int]] = []
    if learner.hosts == 1:
        wanted.append(("learner", learner.hardware, learner.mesh.devices))
    for island, processes in island_processes(spec).items():
        own = island_spec(spec, island).learner
        if own.hosts == 1:
            wanted.append((processes[0], own.hardware, own.mesh.devices))
    if spec.verify.hardware is not None:
        count = device_count(spec.verify.hardware) or 1
        wanted += [(name, spec.verify.hardware, count) for name in validator_names(spec)]
    for name in evaluator_names(spec):
        engine = evaluator_pool(spec)
        wanted.append((name, engine.hardware, engine.parallel.devices))
    pools = {pool.name: pool for pool in spec.samplers}
    for name, pool in worker_names(spec).items():
        wanted.append((name, pools[pool].hardware, pools[pool].parallel.devices))
    assigned = dict(spec.placement.devices)
    for tpu in (True, False):
        users = {
            name: count
            for name, hardware, count in wanted
            if name in here and hardware.kind != "cpu" and hardware.kind.startswith("tpu") == tpu
        }
        taken = {number for name in users for number in assigned.get(name, ())}
        free = (number for number in itertools.count() if number not in taken)
        for name in users if len(users) > 1 else ():
            if name not in assigned:
                assigned[name] = list(itertools.islice(free, users[name]))
    return assigned


def thread_limits(cores: Sequence[int]) -> dict[str, str]:
    """Environment of every role: no thread pool larger than the cores it was given."""
    return {
        "OMP_NUM_THREADS": str(max(1, len(cores))),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def jax_environment(inherited: Mapping[str, str], *, on_cpu: bool, devices: int) -> dict[str, str]:
    """Environment of a role that runs JAX.

    Args:
        inherited: the supervisor's environment, whose XLA_FLAGS are kept.
        on_cpu: whether its hardware is `cpu`.
        devices: virtual CPU devices: the product of the mesh.
    """
    if not on_cpu:
        return {}
    flags = [
        *inherited.get("XLA_FLAGS", "").split(),
        "--xla_cpu_multi_thread_eigen=false",
        f"--xla_force_host_platform_device_count={devices}",
    ]
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)} | xla_threads(devices)


# Chips of one process on a TPU host that holds several, as libtpu wants them told (Cloud TPU's
# "Run multiple processes on one TPU VM"); other numbers are no rectangle of a host.
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


def visible_devices(kind: str, numbers: Sequence[int] | None) -> dict[str, str]:
    """Environment of a role that sees only some accelerators of its machine.

    Args:
        kind: `hardware.kind`.
        numbers: as the driver counts them; None: all.
    """
    if numbers is None:
        return {}
    listed = ",".join(str(number) for number in numbers)
    if not kind.startswith("tpu"):
        return {"CUDA_VISIBLE_DEVICES": listed}
    bounds = _TPU_BOUNDS.get(len(numbers))
    shape = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds}
    return {"TPU_VISIBLE_CHIPS": listed} | {k: v for k, v in shape.items() if v and bounds}


def vllm_environment(cores: Sequence[int], *, on_cpu: bool, tensor: int) -> dict[str, str]:
    """Environment of a vLLM sampler.

    Args:
        cores: the cores it is pinned to.
        on_cpu: whether its hardware is `cpu`.
        tensor: tensor-parallel ranks; several share the process's cores as the kernel sees fit.
    """
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if on_cpu:
        pinned = bool(cores) and tensor == 1
        variables["VLLM_CPU_OMP_THREADS_BIND"] = (
            ",".join(str(core) for core in cores) if pinned else "nobind"
        )
    return variables
