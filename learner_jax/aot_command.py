"""`python -m learner_jax aot`: a run's programs compiled for its hardware, as JSON.

Sets the environment before JAX is imported, so it runs in a process of its own.

JAX is imported inside functions alone. TPU slices go by name, on a machine that has none.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from runspec.core.entry_points import install_command
from runspec.core.errors import UserError
from runspec.core.schema import Learner

if TYPE_CHECKING:
    import jax
import json
from collections.abc import Sequence

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.files import read_bounded
from runspec.core.models import CONFIG_NAME, DEVICES, ModelConfig, device_of
from runspec.core.models.family import model_config, model_names, parse_config
from runspec.core.run_files import initial_model
from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles, load_layers, load_resolved

TPU = "tpu-"
"""Begins the spec's `hardware.kind` of a TPU; the rest is the name that libtpu gives the chip."""
CHIPS = ("v5e", "v5p", "v6e")
"""Those that libtpu compiles for as one device a chip; of a v4 it makes two."""


@dataclass(frozen=True)
class Topology:
    """A slice, like v5p:4x4x4."""

    chip: str
    shape: str

    @property
    def kind(self) -> str:
        """As the spec's `hardware.kind` says it."""
        return f"{TPU}{self.chip}"

    def __str__(self) -> str:
        return f"{self.chip}:{self.shape}"


def parse_topology(text: str) -> Topology:
    """Reads `v5p:4x4x4`.

    Raises:
        UserError: another form, or a chip that is not known.
    """
    chip, _, shape = text.partition(":")
    if chip not in CHIPS or not re.fullmatch(r"\d{1,4}(x\d{1,4}){1,2}", shape):
        raise UserError(
            f"no TPU topology: {text!r}",
            place="topology",
            remedy=f"write it like v5p:4x4x4; chips: {', '.join(CHIPS)}",
        )
    return Topology(chip, shape)


def learner_topology(learner: Learner) -> Topology | None:
    """The slice that `learner.hardware` names; None where it is no TPU.

    Raises:
        UserError: a TPU that is not known, or no topology.
    """
    hardware = learner.hardware
    if not hardware.kind.startswith(TPU):
        return None
    return parse_topology(f"{hardware.kind.removeprefix(TPU)}:{hardware.topology or ''}")


def compiler_library() -> Path | None:
    """The file of libtpu, or None: of TPU_LIBRARY_PATH, of an installed package, or what `make aot`
    puts into `aot/` of the environment. There no import finds it: vLLM takes a machine whose Python
    can import libtpu for a TPU."""
    if named := os.environ.get("TPU_LIBRARY_PATH"):
        return Path(named) if Path(named).is_file() else None
    package = find_spec("libtpu")
    folders = list(package.submodule_search_locations or []) if package else []
    found = (Path(folder) / "libtpu.so" for folder in [*folders, f"{sys.prefix}/aot/libtpu"])
    return next((path for path in found if path.is_file()), None)


def prepare_environment() -> None:
    """Before the first use of JAX: the local devices are the CPU's, and libtpu, which is only
    to compile, looks for no TPU, asks no metadata server and takes no lock on the machine's."""
    library = compiler_library()
    if library is not None:
        os.environ["TPU_LIBRARY_PATH"] = str(library)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    # What libtpu compiled without a TPU it writes into JAX's cache and cannot read back.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def topology_devices(topology: Topology, slices: int = 1) -> list[jax.Device]:
    """The devices of `slices` slices, which exist for the compiler alone.

    Raises:
        UserError: libtpu is missing or does not know the topology.
    """
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies

    if compiler_library() is None:
        raise UserError(
            "the TPU compiler, libtpu, is not installed",
            place=os.environ.get("TPU_LIBRARY_PATH", sys.prefix),
            remedy=f"make aot, or {install_command('aot')} where vLLM is not installed",
        )
    try:
        found = topologies.get_topology_desc(
            topology_name=str(topology), platform="tpu", num_slices=slices
        )
    except JaxRuntimeError as error:
        raise UserError(
            f"libtpu cannot make {topology}: {str(error).splitlines()[0]}",
            place="topology",
            remedy="name a slice that exists; its first two sizes are multiples of 2",
        ) from error
    return list(found.devices)


_MAX_CONFIG_BYTES = 1024 * 1024


def aot_command(
    run: Path,
    programs: Sequence[str] | None,
    *,
    profile: str | None,
    overrides: Sequence[str],
    topology: str | None,
    model_config: Path | None,
) -> None:
    """Compiles programs of the run and prints a report.

    Args:
        run: a spec, or a run directory with the resolved one.
        programs: names of programs of `step.Programs`; None: those that the run uses.
        profile, overrides: of a spec.
        topology: in place of `learner.hardware`.
        model_config: config.json of the model, in place of what the spec names.

    Raises:
        UserError: no such spec, model shape, topology or compiler, the mesh does not match, or a
            program needs more memory than a device has.
    """
    named = None if topology is None else parse_topology(topology)
    if run.is_dir():
        spec = load_resolved(run)
    else:
        layers = list(overrides)
        if named is not None:
            hardware = {"kind": named.kind, "topology": named.shape}
            layers += [f"learner.hardware.{key}={value}" for key, value in hardware.items()]
        # The rules of `runspec lint` stay out: whether the run fits is what the compiler is asked.
        spec = load_layers(SpecFiles(run, profile, overrides=layers)).require()
    target = named or learner_topology(spec.learner)
    devices, memory = _devices(spec.learner, target)
    from learner_jax.aot import analyse, used_programs  # the environment is set now

    config, names = _model_config(run, model_config, spec), programs or used_programs(spec)
    whole = None if memory is None else int(memory)
    report = analyse(spec, config, devices, memory=whole, names=names)
    where = spec.learner.hardware.kind if target is None else str(target)
    print(json.dumps({"run": spec.name, "topology": where, **report}, indent=2))
    if report["memory"]["fits"] is False:
        raise UserError(
            "the run does not fit in the memory of its devices",
            place=where,
            remedy="more devices, more of learner.mesh.fsdp or tensor, fewer packing.rows, "
            "or optimizer.offload",
        )


def _model_config(run: Path, named: Path | None, spec: RunSpec) -> ModelConfig:
    if named is None and initial_model(run).exists():
        named = initial_model(run) / CONFIG_NAME
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
