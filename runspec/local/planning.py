"""What applying a spec would do on this machine now; nothing is written and no lock is taken."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from runspec.common.errors import UserError
from runspec.common.process import EXIT_FINAL
from runspec.local.preflight import Missing, look, missing
from runspec.local.run_dir import holder
from runspec.local.state import RunState
from runspec.plan.changes import Change, difference
from runspec.plan.saved import Seen
from runspec.spec.resolved import FILE_NAME as SPEC_FILE
from runspec.spec.resolved import load_resolved, spec_digest
from runspec.spec.schema import RunSpec


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
    """Of a new run: everything."""
    state: str
    """Of the run, as `apply` left it; `new` where there is none."""
    held_by: str | None
    """Its supervisor, in words; None for a run that is not alive."""
    lacking: Sequence[Missing]
    """What this machine has not, that the spec needs."""

    @property
    def new(self) -> bool:
        return self.seen.spec_digest is None


def make_plan(spec: RunSpec, run_dir: Path) -> RunPlan:
    """Compares a spec with the run in a directory, which need not be there.

    Raises:
        UserError: the run's spec or state cannot be read.
    """
    lacking = missing(spec, run_dir, look(run_dir))
    if not (run_dir / SPEC_FILE).exists():
        return RunPlan(spec, run_dir, Seen(0, None), difference(None, spec), "new", None, lacking)
    held_by = holder(run_dir)
    with closing(RunState(run_dir)) as state:
        row, old = state.run(), load_resolved(run_dir)
        seen = seen_now(state, old)
    word = row.state if row else "starting"
    if held_by is None and word in ("starting", "running"):
        word = "interrupted"
    return RunPlan(spec, run_dir, seen, difference(old, spec), word, held_by, lacking)


def seen_now(state: RunState, spec: RunSpec | None) -> Seen:
    """The state of a run as it is, by its tables and its spec."""
    return Seen(state.serial(), spec_digest(spec) if spec is not None else None)


def refuse_stale(seen: Seen | None, state: RunState, spec: RunSpec | None) -> None:
    """Raises StalePlan, saying what was changed since, where a plan has seen another state.

    Args:
        seen: by the plan; None where there is none.
        state: of the run, now.
        spec: the run's, now.
    """
    now = seen_now(state, spec)
    if seen is None or seen == now:
        return
    since = [row for row in state.applied() if row.serial > seen.serial]
    lines = [f"  serial {row.serial}: {line}" for row in since for line in row.what]
    raise StalePlan(
        "\n".join(
            [f"the plan saw the run at serial {seen.serial}, it is at {now.serial} now", *lines]
        ),
        place="" if spec is None else spec.name,
        remedy="plan again, and look at the new plan",
    )
