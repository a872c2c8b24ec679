"""Plug-ins by entry point, this distribution's own name, and adapters of evaluation tools.

Nothing here imports a plug-in to list it. The name `runspec` belongs to another package in the
public registry, and this one is not published. So messages name the wheel's file, never a bare name
that a stranger could register.

Adapters of other projects' evaluation tools have the entry point `runspec.evaluations`. A tool runs
in an environment of its own, asks an OpenAI-compatible server, and writes files. Its adapter says
the command line and reads the files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any, Literal, Protocol

from runspec.core.errors import BadUsage


def entry_points_of(group: str) -> EntryPoints:
    """Return the entry points of a group, read once for each `sys.path`.

    Reading takes 12 ms where 250 packages are installed.
    """
    found: EntryPoints = _all_of(tuple(sys.path)).select(group=group)
    return found


@lru_cache(maxsize=4)
def _all_of(path: tuple[str, ...]) -> Any:
    return entry_points()


NAME = "runspec-rl"
WHEEL = "runspec_rl-0.1.0-py3-none-any.whl"
"""File that `make wheel` writes to `dist/`."""
Kind = Literal["cpu", "cuda", "tpu"]


@dataclass(frozen=True)
class PinnedList:
    """File of a checkout that pins every package of some extras."""

    file: str
    python: str
    """Python version that the list was resolved for."""
    extras: tuple[str, ...]


LISTS: dict[Kind, PinnedList] = {
    "cpu": PinnedList("requirements/laptop.txt", "3.11", ("learner", "sampler-cpu", "report")),
    "cuda": PinnedList(
        "requirements/cuda.txt", "3.11", ("learner-cuda", "sampler-cuda", "ray", "report")
    ),
    "tpu": PinnedList("requirements/tpu.txt", "3.11", ("learner-tpu", "ray", "report")),
}
"""Lists by machine; that for TPUs has no sampler."""
NO_TPU_SAMPLER = (
    "vLLM 0.32 takes no custom logits processor on TPUs, which seeds tokens and records proofs, "
    "and loads no new weights there"
)
"""Source: its `v1/sample/logits_processor/__init__.py`, and `TPUWorker`, which has neither
`reload_weights` nor an `update_weights` that does anything."""


def machine_kind(gpus: Sequence[str], tpus: int) -> Kind:
    """Return the kind of a machine.

    Args:
        gpus: names of its NVIDIA GPUs.
        tpus: number of its TPU chips.
    """
    return "cuda" if gpus else "tpu" if tpus else "cpu"


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package from the wheel's folder."""
    return f'pip install "./{WHEEL}[{extra}]"'


def list_command(kind: Kind) -> str:
    """Return the command that installs the list of a kind of machine.

    Outside of a checkout it installs the wheel's extras, without pins.
    """
    pinned, checkout = LISTS[kind], Path(__file__).parents[2]
    if not (checkout / pinned.file).is_file():
        return install_command(",".join(pinned.extras))
    if kind == "cpu":
        return "make install"
    pip = ".venv/bin/pip install --no-deps"
    return f"python{pinned.python} -m venv .venv && {pip} -r {pinned.file} -e ."


def extra_of(part: str, kind: Kind) -> str:
    """Return the extra that installs a part of a run (learner, sampler, ...) on such a machine."""
    extra = f"{part}-{kind}"
    return extra if any(extra in each.extras for each in LISTS.values()) else part


GROUP = "runspec.evaluations"
KEY_VARIABLE = "RUNSPEC_API_KEY"
"""Environment variable with the server's key, which tools want and the server does not check."""
Figures = Mapping[str, tuple[float, float | None, float | None]]
"""Value by name, with the ends of its 95 % interval where the tool gives one."""


@dataclass(frozen=True)
class Asked:
    """What a tool is to do."""

    python: Path
    """The interpreter of its environment; its commands lie beside it."""
    url: str
    """Of the server, up to `/v1`."""
    model: str
    """Name of the model there."""
    tokenizer: Path
    """Folder with the model's tokenizer."""
    context: int
    """Most tokens of prompt and answer."""
    task: str
    """In the tool's own terms."""
    out: Path
    """Empty folder for its files."""
    more: Sequence[str]
    """Further options of the tool."""


@dataclass(frozen=True)
class Measured:
    """What a tool says of one task."""

    figures: Figures
    count: int
    """Problems of the task."""
    faults: int
    """Answers without a grade."""


class EvaluationTool(Protocol):
    """Interface of an entry point: a class made without arguments."""

    def command(self, asked: Asked) -> list[str]:
        """Return the command line."""

    def measured(self, out: Path) -> Mapping[str, Measured]:
        """Return the results by task, from the files that the tool wrote to `out`.

        Raises:
            UserError: the tool failed, or its files cannot be read.
        """


def evaluation_tool(name: str) -> EvaluationTool:
    """Return the adapter of a name.

    Raises:
        BadUsage: no installed package offers it.
    """
    offered = {point.name: point for point in entry_points_of(GROUP)}
    if name not in offered:
        raise BadUsage(
            f"no adapter {name!r}; there are {', '.join(sorted(offered))}",
            place="--with",
            remedy="install the package that offers it",
        )
    made: EvaluationTool = offered[name].load()()
    return made
