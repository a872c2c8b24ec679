"""Name of the installed distribution, and the commands that install it and its extras.

The name `runspec` belongs to another package in the public registry, and this one is not published.
So messages name the wheel's file, never a bare name that a stranger could register.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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


LISTS = {
    "cpu": PinnedList("requirements/laptop.txt", "3.11", ("learner", "sampler-cpu", "report")),
    "cuda": PinnedList(
        "requirements/cuda.txt", "3.11", ("learner-cuda", "sampler-cuda", "ray", "report")
    ),
    "tpu": PinnedList("requirements/tpu.txt", "3.11", ("learner-tpu", "ray", "report")),
    "tpu-sampler": PinnedList("requirements/tpu-sampler.txt", "3.12", ("sampler-tpu",)),
}
"""Lists by machine: one for each `Kind`, for a whole run, and one for TPU hosts that sample."""


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
