"""Fingerprint: the facts, besides spec and rollouts, that fix the bits of a training step.

On one fingerprint the same rollouts give the same bits. Elsewhere they give the same numbers up to
rounding, and the difference is reported.
"""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from runspec.core.hashing import digest_bytes
from runspec.core.spec.schema import RunSpec

DETERMINISTIC_GPU_FLAGS = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
"""XLA_FLAGS, either of which leaves out the GPU's atomics, whose order is chance."""
_NOT_IN_RESULTS = ("--xla_force_host_platform_device_count", "--xla_dump")
_CPUINFO = Path("/proc/cpuinfo")


def fingerprint(spec: RunSpec, mesh: Mesh) -> dict[str, Any]:
    """The facts of this program, by name; JSON as it stands.

    Args:
        spec: of the run.
        mesh: that it trains on.
    """
    device, learner = mesh.devices.flat[0], spec.learner
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        "mesh": dict(mesh.shape),
        "processes": jax.process_count(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "machine": f"{platform.machine()} {_cpu_model()}".strip(),
        "threads": len(os.sched_getaffinity(0)) if device.platform == "cpu" else None,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "optax": version("optax"),
        "runtime": device.client.platform_version,
        "code": _code(),
        "xla_flags": sorted(flag for flag in flags if not flag.startswith(_NOT_IN_RESULTS)),
        "libtpu_flags": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "matmul_precision": jax.config.values["jax_default_matmul_precision"],
        "x64": jax.config.values["jax_enable_x64"],
        "compute_dtype": learner.compute_dtype,
        "master_dtype": learner.master_dtype,
        "broadcast_dtype": spec.broadcast.dtype,
        "packing": learner.packing.model_dump(),
        "logits_chunk": learner.logits_chunk,
        "remat": learner.remat,
        "attention": learner.attention,
        "exact": device.platform != "gpu" or _deterministic_gpu(flags),
    }


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe how two fingerprints differ: `mesh: {...} then, {...} now`, a line a fact."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return [f"{name}: {then.get(name)} then, {now.get(name)} now" for name in names]


def same_bits(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a step trained again must give the same bits."""
    return then == now and bool(now["exact"])


def _deterministic_gpu(flags: list[str]) -> bool:
    """Also needs the choices of the autotuner: they lie beside the compiled programs."""
    on = {f"--{name}{value}" for name in DETERMINISTIC_GPU_FLAGS for value in ("", "=true", "=1")}
    kept = jax.config.values["jax_compilation_cache_dir"]
    return kept is not None and any(flag in on for flag in flags)


def _code() -> str:
    """Digest of this package's source: another order of additions gives other bits."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return digest_bytes(b"".join(path.read_bytes() for path in files))[:16]


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""
