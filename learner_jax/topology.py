"""TPU slices by name, and their devices on a machine that has none.

Imports JAX only inside functions: the environment has to be set before.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from runspec.core.distribution import install_command
from runspec.core.errors import UserError
from runspec.core.spec.schema import Learner

if TYPE_CHECKING:
    import jax


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
