"""The `runspec` command with small processes in the places of a run's roles.

`python -m tests.runspec.local.fake_apply apply ...`, or `fake_roles` in a test's own process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from runspec.cli import main
from runspec.local.processes import PreparedRun, RoleSpec
from tests.runspec.local.fake_run import role, usual_roles


def fake_roles(patch: pytest.MonkeyPatch, extra: Sequence[str] = ()) -> None:
    """Replaces the roles of runs that are applied from now on.

    Args:
        patch: undoes it.
        extra: behaviours of `role.py` beside the usual ones; as long as there is one, no learner.
    """

    def roles(run: PreparedRun) -> list[RoleSpec]:
        usual = [each for each in usual_roles(run) if not (extra and each.name == "learner")]
        return [*usual, *(role(name, run.directory) for name in extra)]

    def warm_start(run: PreparedRun, cache: Path) -> RoleSpec:
        return replace(role("warm_start", run.directory), name="warm-start")

    patch.setattr("runspec.local.apply.role_specs", roles)
    patch.setattr("runspec.local.apply.first_version_role", warm_start)


if __name__ == "__main__":
    fake_roles(pytest.MonkeyPatch())
    main()
