"""What this package is called where it is installed, and what it is installed with.

In the public registry `runspec` is a package of somebody else, and this one is not published. So
messages name the wheel's file, never a bare name that a stranger could register.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NAME = "runspec-rl"
WHEEL = "runspec_rl-0.1.0-py3-none-any.whl"
"""What `make wheel` makes, below `dist/`."""
Kind = Literal["cpu", "cuda", "tpu"]


@dataclass(frozen=True)
class PinnedList:
    """A file of a checkout that pins every package of some extras."""

    file: str
    python: str
    """The version that the list was resolved for."""
    extras: tuple[str, ...]


LISTS = {
    "cpu": PinnedList("requirements/laptop.txt", "3.11", ("learner", "sampler-cpu", "report")),
    "cuda": PinnedList(
        "requirements/cuda.txt", "3.11", ("learner-cuda", "sampler-cuda", "ray", "report")
    ),
    "tpu": PinnedList("requirements/tpu.txt", "3.11", ("learner-tpu", "ray", "report")),
    "tpu-sampler": PinnedList("requirements/tpu-sampler.txt", "3.12", ("sampler-tpu",)),
}
"""By the machine: those of a `Kind` for the whole of a run, and one for TPU hosts that sample."""


def machine_kind(gpus: Sequence[str], tpus: int) -> Kind:
    """Returns which list fits a machine.

    Args:
        gpus: names of its NVIDIA GPUs.
        tpus: its TPU chips.
    """
    return "cuda" if gpus else "tpu" if tpus else "cpu"


def install_command(extra: str) -> str:
    """Returns the command that installs an extra of this package from the wheel's folder."""
    return f'pip install "./{WHEEL}[{extra}]"'


def list_command(kind: Kind) -> str:
    """Returns the command that installs the list of a kind of machine: in a checkout, else by the
    wheel's extras, without the pins.
    """
    pinned, checkout = LISTS[kind], Path(__file__).parents[2]
    if not (checkout / pinned.file).is_file():
        return install_command(",".join(pinned.extras))
    if kind == "cpu":
        return "make install"
    pip = ".venv/bin/pip install --no-deps"
    return f"python{pinned.python} -m venv .venv && {pip} -r {pinned.file} -e ."


def extra_of(part: str, kind: Kind) -> str:
    """Returns the extra that installs a part of a run (learner, sampler, ...) on such a machine."""
    extra = f"{part}-{kind}"
    return extra if any(extra in each.extras for each in LISTS.values()) else part
