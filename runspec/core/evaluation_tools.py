"""Adapters to other projects' evaluation tools, by entry point `runspec.evaluations`.

A tool runs in an environment of its own, asks an OpenAI-compatible server, and writes files. Its
adapter says the command line and reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runspec.core.entry_points import entry_points_of
from runspec.core.errors import BadUsage

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
