"""Plans what applying a spec would do on this machine; writes nothing and takes no lock.

Some changes make another run. A run may become that other run before its first step: the learner
writes version s + 1 before anything else of step s, so a run without a version after 0 has nothing
to lose.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.process import EXIT_FINAL
from runspec.core.run_files import params_folder, versions_in, weights_folder
from runspec.core.spec.resolved import FILE_NAME as SPEC_FILE
from runspec.core.spec.resolved import load_resolved, spec_digest
from runspec.core.spec.schema import RunSpec
from runspec.local.backend import AT_TRUNK, LOCAL
from runspec.local.full_states import full_states
from runspec.local.metrics import read_rows
from runspec.local.preflight import Missing, look, missing
from runspec.local.run_dir import holder
from runspec.local.state import RunState
from runspec.plan.changes import Change, difference, of_class
from runspec.plan.saved import Seen

STARTS_ANEW = "no step was trained: starts anew with the changed spec"


class StalePlan(UserError):
    """The run has changed since the plan was made."""

    exit_code = EXIT_FINAL


@dataclass(frozen=True)
class RunPlan:
    """A spec beside the run of its name."""

    spec: RunSpec
    run_dir: Path
    seen: Seen
    changes: Sequence[Change]
    """All fields, for a new run."""
    state: str
    """State of the run, as `apply` left it; `new` where there is none."""
    held_by: str | None
    """Its supervisor, in words; None for a run that is not alive."""
    lacking: Sequence[Missing]
    """Things that the spec needs and this machine lacks."""
    approved: Seen | None = None
    """The state that a person has seen in a saved plan; None where nothing was saved."""
    finished: bool = False
    """Whether all the steps of the spec are trained."""

    @property
    def new(self) -> bool:
        return self.seen.spec_digest is None


def make_plan(spec: RunSpec, run_dir: Path, approved: Seen | None = None) -> RunPlan:
    """Compares a spec with the run in a directory, which need not be there.

    Args:
        spec: what the run is to be.
        run_dir: its directory.
        approved: the state that a saved plan was made from; None where nothing was saved.

    Raises:
        UserError: the run's spec or state cannot be read.
    """
    here = spec.placement.backend == LOCAL or AT_TRUNK in os.environ
    lacking, seen = missing(spec, run_dir, look()) if here else [], seen_now(run_dir)
    if seen.spec_digest is None:
        changes = difference(None, spec)
        return RunPlan(spec, run_dir, seen, changes, "new", None, lacking, approved)
    held_by, changes = holder(run_dir), difference(load_resolved(run_dir), spec)
    with closing(RunState(run_dir)) as state:
        row = state.run()
    word = row.state if row else "starting"
    finished = row is not None and word == "finished" and row.steps >= spec.steps
    if held_by is None and word in ("starting", "running"):
        word = "interrupted"
    return RunPlan(spec, run_dir, seen, changes, word, held_by, lacking, approved, finished)


def current(plan: RunPlan) -> RunPlan:
    """The plan, or a new one where the run has changed since."""
    if seen_now(plan.run_dir) == plan.seen:
        return plan
    return make_plan(plan.spec, plan.run_dir, plan.approved)


def seen_now(run_dir: Path) -> Seen:
    """The state that a run is in, by its tables and its spec."""
    if not (run_dir / SPEC_FILE).exists():
        return Seen(0, None)
    with closing(RunState(run_dir)) as state:
        return Seen(state.serial(), spec_digest(load_resolved(run_dir)))


def refuse_stale(plan: RunPlan) -> None:
    """Raises StalePlan, saying what was changed since, where another state was approved."""
    if plan.approved is None or plan.approved == plan.seen:
        return
    raise StalePlan(
        f"the plan is stale: it saw {_words(plan.approved)}, now there is {_words(plan.seen)}"
        + "".join(_since(plan.approved, plan.run_dir)),
        place=str(plan.run_dir),
        remedy="plan again, and look at the new plan",
    )


def _since(seen: Seen, run_dir: Path) -> Iterator[str]:
    """Return the changes applied after a state, a line each."""
    if not (run_dir / SPEC_FILE).exists():
        return
    with closing(RunState(run_dir)) as state:
        for row in state.applied():
            if row.serial > seen.serial:
                yield from (f"\n  serial {row.serial}: {line}" for line in row.what)


def _words(seen: Seen) -> str:
    if seen.spec_digest is None:
        return "no such run"
    return f"serial {seen.serial} with spec {seen.spec_digest[:12]}"


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
