"""`python -m learner_jax aot`: a run's programs compiled for its hardware, as JSON.

Sets the environment before JAX is imported, so it runs in a process of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
from runspec.core.models.config import CONFIG_NAME, ModelConfig
from runspec.core.models.family import parse_config
from runspec.core.models.hardware import DEVICES, device_of
from runspec.core.models.spec_model import model_config, model_names
from runspec.core.run_files import initial_model
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
    programs: Sequence[str] | None
    """Names of programs of `step.Programs`; None: those that the run uses."""
    profile: str | None = None
    overrides: Sequence[str] = ()
    topology: str | None = None
    """In place of `learner.hardware`."""
    model_config: Path | None = None
    """config.json of the model, in place of what the spec names."""


def aot_command(options: AotOptions) -> None:
    """Compiles programs of the run and prints a report.

    Raises:
        UserError: no such spec, model shape, topology or compiler, the mesh does not match, or a
            program needs more memory than a device has.
    """
    spec = _load(options)
    if options.topology is None:
        topology = learner_topology(spec.learner)
    else:
        topology = parse_topology(options.topology)
    devices, memory = _devices(spec.learner, topology)
    from learner_jax.aot import analyse, used_programs  # the environment is set now

    config, names = _model_config(options, spec), options.programs or used_programs(spec)
    whole = None if memory is None else int(memory)
    report = analyse(spec, config, devices, memory=whole, names=names)
    where = spec.learner.hardware.kind if topology is None else str(topology)
    print(json.dumps({"run": spec.name, "topology": where, **report}, indent=2))
    if report["memory"]["fits"] is False:
        raise UserError(
            "the run does not fit in the memory of its devices",
            place=where,
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
    if named is None and initial_model(options.run).exists():
        named = initial_model(options.run) / CONFIG_NAME
    if named is not None:
        try:
            data = read_bounded(named, _MAX_CONFIG_BYTES)
            return parse_config(parse_object(data, max_bytes=_MAX_CONFIG_BYTES), place=str(named))
        except (OSError, MalformedJson) as error:
            raise UserError(f"no model config: {error}", place=str(named)) from error
    config = model_config(spec)
    if config is None:
        raise UserError(
            f"the shape of {spec.model.hf} is not known here",
            place="model.hf",
            remedy="give its config.json: --model-config FILE; known without it: "
            + ", ".join(model_names()),
        )
    return config


def _devices(learner: Learner, topology: Topology | None) -> tuple[list[jax.Device], float | None]:
    """Devices to compile for, and the memory of one where it is known."""
    if topology is not None:
        prepare_environment()
        same = topology.kind == learner.hardware.kind
        memory = (device_of(learner.hardware) if same else DEVICES[topology.kind]).memory
        return topology_devices(topology, learner.mesh.slices), memory
    needed = learner.mesh.devices
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
    return devices, memory or device_of(learner.hardware).memory
