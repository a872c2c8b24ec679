"""The worst mixtures that `python -m tests.campaigns worst_mixtures` found."""

from __future__ import annotations

from tests.runspec.simulate.mixtures import Group, Run

FOUND: list[tuple[Run, list[Group]]] = []
