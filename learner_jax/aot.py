"""Compiles the programs of a run without running them, and says what each needs of a device.

For a TPU slice no chip is needed: libtpu compiles for a topology by its name. All numbers are the
compiler's own; none is a measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from learner_jax.optimizer import HOST_MEMORY
from learner_jax.sharding import AXES, full_float32, make_mesh
from learner_jax.step import Programs, build_programs
from runspec.core.errors import UserError
from runspec.core.models import ModelConfig
from runspec.core.models.parameters import held_weights
from runspec.core.schema import RunSpec

PROGRAMS = ("publish", "score", "accumulate", "apply")
"""Names of the programs of `step.Programs` that can be compiled ahead."""


@dataclass(frozen=True)
class Compiled:
    """One program for one shape of mesh and microbatch."""

    name: str
    executable: jax.stages.Compiled | None
    """None where it needs more memory than the device has."""
    refusal: str
    """The compiler's message then."""
    seconds: dict[str, float]
    """Seconds that lowering and compiling took."""


def used_programs(spec: RunSpec) -> tuple[str, ...]:
    """Return the names of the programs that a run uses, in the order of `PROGRAMS`."""
    supervised = spec.supervised
    scores = supervised is None or supervised.held_out.tokens > 0
    return tuple(name for name in PROGRAMS if scores or name != "score")


def learner_mesh(spec: RunSpec, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh over exactly these devices.

    Raises:
        UserError: the mesh is for another number of them.
    """
    mesh = spec.learner.mesh
    if mesh.devices != len(devices):
        sizes = " x ".join(str(getattr(mesh, axis)) for axis in AXES)
        raise UserError(
            f"{sizes} ({', '.join(AXES)}) is {mesh.devices} devices, "
            f"the topology has {len(devices)}",
            place="learner.mesh",
            remedy="make the product of the mesh equal to the devices, or name another topology",
        )
    return make_mesh(mesh, devices)


def abstract_arguments(programs: Programs) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of each program, as `jax.ShapeDtypeStruct` with shardings."""
    state, (tokens, inputs) = programs.abstract_state, programs.abstract_batch
    count, base = jax.ShapeDtypeStruct((), jnp.int32), programs.abstract_base
    published = _outputs(programs.publish, state.params, base)
    accumulated = (state.params, tokens, inputs, count, base)
    return {
        "publish": (state.params, base),
        "score": (published, tokens, count),
        "accumulate": accumulated,
        "apply": (state, _outputs(programs.accumulate, *accumulated)),
    }


def compile_programs(programs: Programs, names: Sequence[str]) -> Iterator[Compiled]:
    """Compiles programs one after another, each when it is asked for."""
    arguments = abstract_arguments(programs)
    for name in names:
        began = time.perf_counter()
        lowered = getattr(programs, name).lower(*arguments[name])
        lowered_at = time.perf_counter()
        executable, refusal = None, ""
        try:
            executable = lowered.compile()
        except JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            refusal = str(error)
        seconds = {
            "lower_s": round(lowered_at - began, 2),
            "compile_s": round(time.perf_counter() - lowered_at, 2),
        }
        yield Compiled(name, executable, refusal, seconds)


def analyse(
    spec: RunSpec,
    config: ModelConfig,
    devices: Sequence[jax.Device],
    *,
    memory: int | None,
    names: Sequence[str],
) -> dict[str, Any]:
    """Compiles a run's programs and reports them, ready for JSON. Bytes and FLOPs are per device.

    Args:
        spec: mesh, packing, remat, attention, optimizer.
        config: shape of the model.
        devices: to compile for, of this machine or of a topology.
        memory: of one device, bytes; None where it is not known.
        names: of programs.

    Raises:
        UserError: the mesh or the packing does not fit the devices.
    """
    full_float32(spec.learner.compute_dtype)
    mesh = learner_mesh(spec, devices)
    programs = build_programs(spec, config, mesh)
    arguments = abstract_arguments(programs)
    weights = _device_bytes(arguments["score"][0])
    holds_version, holds_reference = held_weights(spec)
    resident = {
        "state": _device_bytes(programs.abstract_state),
        "gradients": _device_bytes(arguments["apply"][1].grads),
        "published": weights if holds_version else 0,
        "reference": weights if holds_reference else 0,
        "batch": _device_bytes(programs.abstract_batch),
    }
    platform = devices[0].platform
    reports = {c.name: _report(c, platform) for c in compile_programs(programs, names)}
    # Beside what a program takes, the learner holds the rest of what a step needs; gradients are
    # there from the end of `accumulate`, which counts them as its own, to that of `apply`.
    held = sum(resident.values()) - resident["gradients"]
    # Held-out documents are scored under a version that is made for it and not kept.
    scored = weights if spec.supervised is not None else 0
    more = {"apply": resident["gradients"], "score": scored}
    needed = {
        name: held + more.get(name, 0) + report["own_bytes"]
        for name, report in reports.items()
        if "own_bytes" in report
    }
    fits = None
    if memory is not None:
        fits = len(needed) == len(reports) and max(needed.values()) <= memory
    return {
        "devices": len(devices),
        "device_kind": devices[0].device_kind,
        "mesh": dict(mesh.shape),
        "microbatch": spec.learner.packing.model_dump(),
        "parameters": sum(math.prod(p.shape) for p in jax.tree.leaves(arguments["score"][0])),
        "remat": spec.learner.remat,
        "attention": spec.learner.attention,
        "compute_dtype": spec.learner.compute_dtype,
        "memory": {
            "device_bytes": memory,
            "resident_bytes": resident,
            "needed_bytes": needed,
            "fits": fits,
            "host_bytes": _device_bytes(programs.abstract_state, kind=HOST_MEMORY),
        },
        "programs": reports,
    }


def _report(compiled: Compiled, platform: str) -> dict[str, Any]:
    if compiled.executable is None:
        return compiled.seconds | {"does_not_fit": compiled.refusal.splitlines()[0]}
    memory, cost = compiled.executable.memory_analysis(), compiled.executable.cost_analysis()
    assert memory is not None and cost is not None  # every backend of ours has both
    own = memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    if platform == "tpu":
        # libtpu counts some temporaries twice, and compiles programs whose sum is above the chip's
        # memory. Its peak is that of the buffers it assigns; the CPU's peak leaves temporaries out.
        own = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    own += memory.generated_code_size_in_bytes
    return compiled.seconds | {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "own_bytes": own,
        "host_temporary_bytes": memory.host_temp_size_in_bytes,
        "flops": cost.get("flops", 0.0),
        "bytes_accessed": cost.get("bytes accessed", 0.0),
    }


def _outputs(program: Any, *arguments: Any) -> Any:
    """Shapes and shardings of what a program gives, without compiling it."""
    return jax.tree.map(
        lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=out.sharding),
        program.lower(*arguments).out_info,
    )


def _device_bytes(tree: Any, *, kind: str | None = None) -> int:
    """Bytes of one device's shards, in the host's memory if `kind` says so."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
        if (leaf.sharding.memory_kind == HOST_MEMORY) == (kind == HOST_MEMORY)
    )
