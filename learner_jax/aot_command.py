"""`python -m learner_jax aot`: a run's programs compiled for its hardware, as JSON.

Sets the environment before JAX is imported, so it runs in a process of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner_jax.topology import (
    Topology,
    learner_topology,
    parse_topology,
    prepare_environment,
    topology_devices,
)
from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.models.config import ModelConfig, parse_config
from runspec.core.models.hardware import DEVICES, device_of
from runspec.core.models.spec_model import model_names, named_model
from runspec.core.spec.load import SpecFiles, load_layers
from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.schema import Learner, RunSpec

if TYPE_CHECKING:
    import jax

_MAX_CONFIG_BYTES = 1024 * 1024


@dataclass(frozen=True)
class AotOptions:
    """Options of the command line."""

    run: Path
    """A spec, or a run directory with the resolved one."""
    programs: Sequence[str]
    """Names of programs of `step.Programs`."""
    profile: str | None = None
    overrides: Sequence[str] = ()
    topology: str | None = None
    """In place of `learner.hardware`."""
    model_config: Path | None = None
    """config.json of the model, in place of what the spec names."""


def aot_report(options: AotOptions) -> dict[str, Any]:
    """Compiles programs of the run and reports them.

    Raises:
        UserError: no such spec, model shape, topology or compiler, or the mesh does not match.
    """
    spec = _load(options)
    topology = (
        parse_topology(options.topology)
        if options.topology is not None
        else learner_topology(spec.learner)
    )
    devices, memory = _devices(spec.learner, topology)
    from learner_jax.aot import analyse  # the environment is set now

    report = analyse(
        spec, _model_config(options, spec), devices, memory=memory, names=options.programs
    )
    where = str(topology) if topology is not None else spec.learner.hardware.kind
    return {"run": spec.name, "topology": where, **report}


def aot_command(options: AotOptions) -> None:
    """Prints the report.

    Raises:
        UserError: as above, and where a program needs more memory than a device has.
    """
    report = aot_report(options)
    print(json.dumps(report, indent=2))
    if report["memory"]["fits"] is False:
        raise UserError(
            "the run does not fit in the memory of its devices",
            place=report["topology"],
            remedy="more devices, more of learner.mesh.fsdp or tensor, fewer packing.rows, "
            "or optimizer.offload",
        )


def _load(options: AotOptions) -> RunSpec:
    if options.run.is_dir():
        return load_resolved(options.run)
    overrides = list(options.overrides)
    if options.topology is not None:
        topology = parse_topology(options.topology)
        hardware = {"kind": topology.kind, "topology": topology.shape}
        overrides += [f"learner.hardware.{key}={value}" for key, value in hardware.items()]
    # The rules of `runspec lint` stay out: whether the run fits is what the compiler is asked.
    return load_layers(SpecFiles(options.run, options.profile, overrides=overrides)).require()


def _model_config(options: AotOptions, spec: RunSpec) -> ModelConfig:
    named = options.model_config
    if named is None and options.run.is_dir() and (options.run / "initial").exists():
        named = options.run / "initial" / "config.json"
    if named is None and spec.model.hf is not None and Path(spec.model.hf).is_dir():
        named = Path(spec.model.hf) / "config.json"
    if named is None and spec.model.shape is not None:
        from learner_jax.warm_start import model_config

        return model_config(spec)
    if named is None:
        shape = named_model(spec.model.hf or "")
        if shape is None:
            raise UserError(
                f"the shape of {spec.model.hf} is not known here",
                place="model.hf",
                remedy="give its config.json: --model-config FILE; known without it: "
                + ", ".join(model_names()),
            )
        return parse_config(shape, place=f"{spec.model.hf}/config.json")
    try:
        data = read_bounded(named, _MAX_CONFIG_BYTES)
        return parse_config(parse_object(data, max_bytes=_MAX_CONFIG_BYTES), place=str(named))
    except (OSError, MalformedJson) as error:
        raise UserError(f"no model config: {error}", place=str(named)) from error


def _devices(learner: Learner, topology: Topology | None) -> tuple[list[jax.Device], int | None]:
    """Devices to compile for, and the memory of one where it is known."""
    if topology is not None:
        prepare_environment()
        same = topology.kind == learner.hardware.kind
        memory = (device_of(learner.hardware) if same else DEVICES[topology.kind]).memory
        return topology_devices(topology, learner.mesh.slices), _whole(memory)
    mesh = learner.mesh
    needed = mesh.data * mesh.fsdp * mesh.context * mesh.tensor
    if learner.hardware.kind == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={needed}"
    import jax

    platform = "cpu" if learner.hardware.kind == "cpu" else "gpu"
    if jax.default_backend() != platform:
        raise UserError(
            f"cannot compile for {learner.hardware.kind}: JAX has {jax.default_backend()} here",
            place="learner.hardware.kind",
            remedy="run it on such a machine, or name a TPU topology: --topology v5p:4x4x4",
        )
    devices = jax.devices()[:needed]
    statistics = devices[0].memory_stats() or {}
    memory = learner.hardware.memory or statistics.get("bytes_limit")
    return devices, _whole(memory or device_of(learner.hardware).memory)


def _whole(memory: float | None) -> int | None:
    return None if memory is None else int(memory)
