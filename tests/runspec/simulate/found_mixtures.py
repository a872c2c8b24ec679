"""The worst mixtures that `python -m tests.campaigns worst_mixtures` found."""

from __future__ import annotations

from tests.runspec.simulate.mixtures import Group, Run

FOUND: list[tuple[Run, list[Group]]] = []
"""Those that take less than a second."""
SLOW: list[tuple[Run, list[Group]]] = []
"""The others, for `python -m tests.campaigns open_runs`."""
