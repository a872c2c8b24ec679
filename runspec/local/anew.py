"""Which changes make another run, and when a run may become that other run: before its first step.

The learner writes version s + 1 first of all that it makes of step s, so a run without a version
after 0 has nothing to lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.run_files import params_folder, versions_in, weights_folder
from runspec.core.spec.resolved import load_resolved
from runspec.local.full_states import full_states
from runspec.local.metrics import read_rows
from runspec.plan.changes import Change, of_class

STARTS_ANEW = "no step was trained: starts anew with the changed spec"


def takes_any_change(run_dir: Path) -> bool:
    """Whether a run has trained no step. One whose root others have pinned takes no such change:
    they may hold its version 0, and a version number is published once.

    Raises:
        UserError: its spec cannot be read.
    """
    spec = load_resolved(run_dir)
    versions = (*versions_in(params_folder(run_dir, spec)), *versions_in(weights_folder(run_dir)))
    trained = max(versions, default=0) > 0 or full_states(run_dir, spec) or read_rows(run_dir)
    return not trained and spec.identity.root_public_key is None


def starts_anew(changes: Sequence[Change], run_dir: Path) -> bool:
    """Whether a run starts anew to take changes over.

    Raises:
        UserError: they need a run of another name.
    """
    refused = of_class(changes, "newrun")
    if refused and not takes_any_change(run_dir):
        listed = "\n".join(f"  {change}" for change in refused)
        raise UserError(
            f"these changes need a run of another name, for they change what is learned:\n{listed}",
            place=str(run_dir),
            remedy=f"start another run with --set name=NAME, or `runspec delete {run_dir}` first",
        )
    return bool(refused)
