"""`runspec apply` on one machine: opens the run directory, supervises its roles, sums it up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.process import EXIT_FINAL, EXIT_USER_ERROR
from runspec.core.spec.resolved import FILE_NAME as SPEC_FILE
from runspec.core.spec.resolved import dump_resolved, load_resolved, spec_digest
from runspec.core.spec.schema import RunSpec
from runspec.local import budget
from runspec.local.children import end_leftovers, last_lines
from runspec.local.conclude import conclude
from runspec.local.endpoints import (
    Endpoints,
    load_endpoints,
    plan_endpoints,
    port_is_free,
    save_endpoints,
)
from runspec.local.fleet import Outcome, Rules
from runspec.local.identity import make_identity
from runspec.local.live import LiveRun, record_applied
from runspec.local.machine import find_model, find_tokenizer, this_machine
from runspec.local.planning import refuse_stale
from runspec.local.preflight import Missing, look, missing
from runspec.local.processes import Machine, RoleSpec, role_specs, warm_start_role
from runspec.local.progress import RunProgress, StageProgress
from runspec.local.rollback import complete_rollback
from runspec.local.run_dir import hold, refuse_another_run, run_directory
from runspec.local.starting_model import link_model
from runspec.local.state import RunState
from runspec.local.supervisor import Progress, Supervisor, Watcher, describe_exit
from runspec.plan.changes import difference
from runspec.plan.saved import Seen

INITIAL = "initial"
LOG_LINES = 20


class NotReady(UserError):
    """The machine lacks things that the run needs."""

    def __init__(self, spec: RunSpec, lacking: Sequence[Missing]) -> None:
        self.name, self.lacking = spec.name, list(lacking)
        listed = "\n".join(f"  {item.path}: {item.thing}" for item in lacking)
        super().__init__(f"{spec.name} cannot start on this machine:\n{listed}")


class RunFailed(UserError):
    """A role ended the run; `exit_code` is what `apply` exits with."""

    def __init__(self, thing: str, *, place: str, remedy: str, exit_code: int) -> None:
        super().__init__(thing, place=place, remedy=remedy)
        self.exit_code = exit_code


@dataclass(frozen=True)
class OpenRun:
    """A run directory that this process holds the lock of."""

    directory: Path
    spec: RunSpec
    endpoints: Endpoints
    lock: int
    """File descriptor."""


def is_finished(spec: RunSpec, runs_dir: Path | None) -> bool:
    """Whether this run has been trained to its last step already.

    Raises:
        UserError: the directory is another spec's.
    """
    run_dir = run_directory(spec, runs_dir)
    if not (run_dir / SPEC_FILE).exists():
        return False
    refuse_another_run(difference(load_resolved(run_dir), spec), run_dir)
    with closing(RunState(run_dir)) as state:
        row = state.run()
    return row is not None and row.state == "finished" and row.steps >= spec.steps


@contextmanager
def open_run(
    spec: RunSpec,
    runs_dir: Path | None,
    *,
    seen: Seen | None = None,
    leftover_patience_s: float = 10.0,
) -> Iterator[OpenRun]:
    """Makes or opens the run's directory, and holds it.

    Roles that a killed supervisor left behind are ended first: SIGTERM, and SIGKILL after
    `leftover_patience_s`.

    Args:
        spec: what the run is to be.
        runs_dir: where runs lie; None: where the spec says.
        seen: the state that a saved plan was made from; None where nothing was planned.
        leftover_patience_s: see above.

    Raises:
        StalePlan: the run's state is another than the plan has seen.
        NotReady: this machine cannot start it; nothing was made.
        RunLocked: it is alive elsewhere.
        UserError: a port is taken, or the directory is another spec's.
    """
    run_dir = run_directory(spec, runs_dir)
    if not (run_dir / SPEC_FILE).exists():
        # Asked before the first file is made: a run that cannot start leaves nothing behind.
        require_ready(spec, run_dir)
        _plan(spec, run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the run's directory cannot be made: {error.strerror}",
            place=str(run_dir),
            remedy="mend the permissions, or say another --runs-dir",
        ) from error
    with hold(run_dir) as lock:
        complete_rollback(run_dir)
        with closing(RunState(run_dir)) as state:
            known = (run_dir / SPEC_FILE).exists()
            before = load_resolved(run_dir) if known else None
            refuse_stale(seen, run_dir)
            changes = difference(before, spec)
            if before is not None:
                refuse_another_run(changes, run_dir)
                require_ready(spec, run_dir)
            end_leftovers(state.roles(), leftover_patience_s)
            endpoints = _plan(spec, run_dir)
            save_endpoints(run_dir, endpoints)
            write_atomic(run_dir / SPEC_FILE, dump_resolved(spec))
            record_applied(state, spec, changes)
        yield OpenRun(run_dir, spec, endpoints, lock)


def supervise(run: OpenRun, watcher: Watcher, stop_requests: Callable[[], int]) -> Outcome:
    """Runs the stages and then the roles of an open run until it ends, and writes its summary.

    Returns:
        The outcome, `finished`, `paused` or `interrupted`.

    Raises:
        RunFailed: a role kept dying, or said that the run cannot go on; with its last lines.
        UserError: a process cannot be started or a file cannot be written.
    """
    with closing(RunState(run.directory)) as state:
        state.begin(run.spec.name, spec_digest(run.spec), run.spec.steps)
        with _failure_on_record(run, state):
            machine = this_machine()

            def roles_of(spec: RunSpec) -> list[RoleSpec]:
                identity = make_identity(run.directory, spec)
                return role_specs(
                    spec, run.directory, endpoints=run.endpoints, identity=identity, machine=machine
                )

            roles_of(run.spec)  # what is wrong with it is said before a stage works for nothing
            stages = _stages(run, machine)
        return drive(run, stages, roles_of, state, watcher, stop_requests)


def drive(
    run: OpenRun,
    stages: Sequence[RoleSpec],
    roles_of: Callable[[RunSpec], Sequence[RoleSpec]],
    state: RunState,
    watcher: Watcher,
    stop_requests: Callable[[], int],
) -> Outcome:
    """`supervise` with the processes given: each stage by itself, then all roles at once."""

    def budget_ends_at(spec: RunSpec) -> float | None:
        left_s = budget.left_s(spec, state.wall_s())
        return None if left_s is None else time.monotonic() + left_s

    live = LiveRun(run.directory, run.spec, state, roles_of, budget_ends_at)

    def until_end(specs: Sequence[RoleSpec], progress: Progress) -> Outcome:
        rules = Rules(
            restarts=live.spec.placement.restarts,
            ends_run=frozenset(role.name for role in specs if role.ends_run),
            ends_when_sampled=frozenset(role.name for role in specs if role.ends_when_sampled),
            servers=frozenset(role.name for role in specs if role.listen is not None),
            budget_ends_at=budget_ends_at(live.spec),
        )
        return Supervisor(
            specs,
            logs=run.directory / "logs",
            rules=rules,
            state=state,
            progress=progress,
            watcher=watcher,
            stop_requests=stop_requests,
            take=live.take,
        ).run()

    with _failure_on_record(run, state):
        outcome = Outcome("finished")
        for stage in stages:
            state.set_run("starting", stage.name)
            outcome = until_end(
                [stage],
                StageProgress(_starting_model(run), run.directory / "logs" / f"{stage.name}.log"),
            )
            if outcome.kind != "finished":
                break
        else:
            state.set_run("running")
            outcome = until_end(
                roles_of(live.spec), RunProgress(run.directory, run.spec, run.endpoints.coordinator)
            )
        failure = _failure(replace(run, spec=live.spec), outcome)
        if failure is not None:
            raise failure
        state.set_run(outcome.kind)
    conclude(run.directory, state.wall_s())
    return outcome


@contextmanager
def _failure_on_record(run: OpenRun, state: RunState) -> Iterator[None]:
    """Tells `status` what ended the run, and sums up what was trained before."""
    try:
        yield
    except Exception as error:
        reason = error.thing if isinstance(error, UserError) else f"internal error: {error!r}"
        with suppress(UserError):  # a full disk; the first error is the one to read
            state.set_run("failed", reason.splitlines()[0])
            conclude(run.directory, state.wall_s())
        raise


def require_ready(spec: RunSpec, run_dir: Path) -> None:
    """Raises NotReady, listing everything that this machine lacks for a run."""
    lacking = missing(spec, run_dir, look())
    if lacking:
        raise NotReady(spec, lacking)


def _plan(spec: RunSpec, run_dir: Path) -> Endpoints:
    return plan_endpoints(spec, load_endpoints(run_dir), port_is_free, random.Random())


def _stages(run: OpenRun, machine: Machine) -> list[RoleSpec]:
    """What must run before version 0 exists: nothing where the starting model is there already."""
    initial = run.directory / INITIAL
    if _starting_model(run).exists():
        return []
    if run.spec.warm_start is not None:
        # Beside the runs, so that a second run finds the start that the first one made.
        cache = run.directory.parent.parent / ".cache" / "warm_start"
        return [warm_start_role(run.spec, run.directory, cache=cache, machine=machine)]
    assert run.spec.model.hf is not None, "the linter sees to it: a shape has a warm start"
    found = find_model(run.spec.model.hf, run.spec.model.revision, machine.env)
    assert found is not None, "the preflight sees to it"
    asked, tokenizer = run.spec.model.tokenizer, None
    if asked is not None:
        tokenizer = find_tokenizer(asked.hf, asked.revision, machine.env)
        assert tokenizer is not None, "the preflight sees to it"
    link_model(initial, found, tokenizer)
    return []


def _starting_model(run: OpenRun) -> Path:
    """A file that is there once version 0 is."""
    return run.directory / INITIAL / "config.json"


def _failure(run: OpenRun, outcome: Outcome) -> RunFailed | None:
    """The error that an outcome is, with the role's last words."""
    if outcome.kind in ("finished", "paused", "interrupted"):
        return None
    if outcome.kind == "over_budget":
        spent = budget.limits(run.spec)[0]
        return RunFailed(
            f"the budget of {spent.hours:g} hours is used up",
            place=spent.path,
            remedy=f"apply again with --set {spent.path}=MORE to go on",
            exit_code=EXIT_USER_ERROR,
        )
    if outcome.kind == "unpublished":
        return RunFailed(
            f"every step is trained, but version {run.spec.steps} was not published",
            place=str(run.directory / "logs" / "publisher.log"),
            remedy="see what it waits for, then apply again",
            exit_code=EXIT_USER_ERROR,
        )
    log = run.directory / "logs" / f"{outcome.role}.log"
    why = (
        f"{outcome.role} says that the run cannot go on"
        if outcome.kind == "stopped"
        else f"{outcome.role} kept dying ({describe_exit(outcome.exit_code)})"
    )
    lines = "\n".join(f"  | {line}" for line in last_lines(log, LOG_LINES))
    return RunFailed(
        f"{why}; its last lines:\n{lines}",
        place=str(log),
        remedy="mend what they say, then apply again: the run goes on from its newest checkpoint",
        exit_code=EXIT_FINAL if outcome.kind == "stopped" else EXIT_USER_ERROR,
    )
