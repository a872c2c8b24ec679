"""What applying a spec would do on this machine now; nothing is written and no lock is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.process import EXIT_FINAL
from runspec.core.spec.resolved import FILE_NAME as SPEC_FILE
from runspec.core.spec.resolved import load_resolved, spec_digest
from runspec.core.spec.schema import RunSpec
from runspec.local.preflight import Missing, look, missing
from runspec.local.run_dir import holder
from runspec.local.state import RunState
from runspec.plan.changes import Change, difference
from runspec.plan.saved import Seen


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
    lacking = missing(spec, run_dir, look())
    if not (run_dir / SPEC_FILE).exists():
        return RunPlan(spec, run_dir, Seen(0, None), difference(None, spec), "new", None, lacking)
    held_by, old = holder(run_dir), load_resolved(run_dir)
    with closing(RunState(run_dir)) as state:
        row = state.run()
    word = row.state if row else "starting"
    if held_by is None and word in ("starting", "running"):
        word = "interrupted"
    seen, changes = seen_now(run_dir), difference(old, spec)
    return RunPlan(spec, run_dir, seen, changes, word, held_by, lacking)


def seen_now(run_dir: Path) -> Seen:
    """The state that a run is in, by its tables and its spec."""
    if not (run_dir / SPEC_FILE).exists():
        return Seen(0, None)
    with closing(RunState(run_dir)) as state:
        return Seen(state.serial(), spec_digest(load_resolved(run_dir)))


def refuse_stale(seen: Seen | None, run_dir: Path) -> None:
    """Raises StalePlan, saying what was changed since, where a plan has seen another state.

    Args:
        seen: by the plan; None where there is none.
        run_dir: of the run.
    """
    now = seen_now(run_dir)
    if seen is None or seen == now:
        return
    raise StalePlan(
        f"the plan is stale: it saw {_words(seen)}, now there is {_words(now)}"
        + "".join(_since(seen, run_dir)),
        place=str(run_dir),
        remedy="plan again, and look at the new plan",
    )


def _since(seen: Seen, run_dir: Path) -> Iterator[str]:
    """What was applied after a state, a line each."""
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
