"""Supervises a prepared run on one machine: its stages, its roles, its summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError, describe_error
from runspec.core.files import write_atomic
from runspec.core.process import EXIT_FINAL, EXIT_USER_ERROR
from runspec.core.run_files import initial_model
from runspec.core.schema.load import spec_digest
from runspec.local.backend import last_lines, processes_of
from runspec.local.diagnosis import results_of, summarise_evaluations
from runspec.local.fleet import Outcome, Rules
from runspec.local.metrics import bytes_sent, read_rows, summarise
from runspec.local.processes import PreparedRun, RoleSpec, first_version_role, role_specs
from runspec.local.progress import Progress, RunProgress, StageProgress, last_error
from runspec.local.run_view import REMEDY, budget_limits
from runspec.local.state import RunState, StorageWait
from runspec.local.supervisor import LiveRun, Session, Supervisor, Watcher, describe_exit
from verify import STORAGE_S

LOG_LINES = 20
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
MAX_REPORT_BYTES = 4_000_000
MAX_READ_S = 5.0
"""Seconds for which rollouts are read; the newest come first."""


class RunFailed(UserError):
    """A role ended the run; `exit_code` is what `apply` exits with."""

    def __init__(
        self, thing: str, *, place: str = "", remedy: str, exit_code: int = EXIT_USER_ERROR
    ) -> None:
        super().__init__(thing, place=place, remedy=remedy)
        self.exit_code = exit_code


def supervise(run: PreparedRun, watcher: Watcher, stop_requests: Callable[[], int]) -> Outcome:
    """Runs the stages and then the roles of a run until it ends, and writes its summary.

    Returns:
        The outcome, `finished`, `paused` or `interrupted`.

    Raises:
        RunFailed: a role kept dying, or said that the run cannot go on; with its last error.
        UserError: a process cannot be started or a file cannot be written.
    """
    stages = [] if _starting_model(run).exists() else [first_version_role(run)]
    with closing(RunState(run.directory)) as state:
        return drive(run, stages, role_specs, state, watcher, stop_requests)


def drive(
    run: PreparedRun,
    stages: Sequence[RoleSpec],
    roles_of: Callable[[PreparedRun], Sequence[RoleSpec]],
    state: RunState,
    watcher: Watcher,
    stop_requests: Callable[[], int],
) -> Outcome:
    """`supervise` with the processes given: each stage by itself, then all roles at once."""
    processes, run = processes_of(run)
    live = LiveRun(run, state)
    state.storage = StorageWait(STORAGE_S, partial(watcher.event, "supervisor"), stop_requests)
    logs = run.directory / "logs"
    session = Session(processes, logs, state, watcher, stop_requests, live.take)

    def until_end(specs: Sequence[RoleSpec], progress: Progress) -> Outcome:
        rules = Rules(live.run.spec.placement.restarts, budget_ends_at=live.budget_ends_at())
        return Supervisor(specs, rules, progress, session).run()

    state.begin(run.spec.name, spec_digest(run.spec), run.spec.steps)
    with _failure_on_record(run, state):
        roles_of(run)  # its errors are raised before a stage works for nothing
        outcome = Outcome("finished")
        for stage in stages:
            state.set_run("starting", stage.name)
            log = session.logs / f"{stage.name}.log"
            progress = StageProgress(_starting_model(run), log)
            outcome = until_end([stage], progress)
            if outcome.kind != "finished":
                break
            result = progress.note.removeprefix(f"{stage.name} ")
            state.add_event(stage.name, result)
            watcher.event(stage.name, result)
        else:
            state.set_run("running")
            steps = RunProgress(run.directory, run.spec, run.endpoints.coordinator)
            outcome = until_end(roles_of(live.run), steps)
        failure = _failure(live.run, outcome)
        if failure is not None:
            raise failure
        state.set_run(outcome.kind)

    def warn(text: str) -> None:
        state.add_event("report", text)
        watcher.event("report", text)

    write_summary(run.directory, state.wall_s(), warn)
    return outcome


@contextmanager
def _failure_on_record(run: PreparedRun, state: RunState) -> Iterator[None]:
    """Records for `status` what ended the run, and writes the summary of its trained steps."""
    try:
        yield
    except Exception as error:
        thing = error.thing if isinstance(error, UserError) else f"internal error: {error!r}"
        reason = thing.splitlines()[0]
        if isinstance(error, RunFailed):
            reason += f"{REMEDY}{error.remedy}"
        with suppress(UserError):  # a full disk; the first error is the one to read
            state.set_run("failed", reason)
            write_summary(run.directory, state.wall_s(), partial(state.add_event, "report"))
        raise


def _starting_model(run: PreparedRun) -> Path:
    """A file that is there once version 0 is."""
    return initial_model(run.directory) / "config.json"


def _failure(run: PreparedRun, outcome: Outcome) -> RunFailed | None:
    """The error that an outcome is; one of a role begins with the role's last error."""
    if outcome.kind in ("finished", "paused", "interrupted"):
        return None
    if outcome.kind == "over_budget":
        path, hours = next(iter(budget_limits(run.spec).items()))
        return RunFailed(
            f"the budget of {hours:g} hours is used up",
            place=path,
            remedy=f"apply again with --set {path}=MORE to go on",
        )
    if outcome.kind == "unpublished":
        return RunFailed(
            f"every step is trained, but version {run.spec.steps} was not published",
            place=str(run.directory / "logs" / "publisher.log"),
            remedy="see what it waits for, then apply again",
        )
    log = run.directory / "logs" / f"{outcome.role}.log"
    why = f"{outcome.role} kept dying ({describe_exit(outcome.exit_code)})"
    if outcome.kind == "stopped":
        why = f"{outcome.role} says that the run cannot go on"
    lines = "\n".join(f"  | {line}" for line in last_lines(log, LOG_LINES))
    error = last_error(log) if outcome.exit_code > 0 else None
    cause = f"{outcome.role}: {error.thing}\n" if error else ""
    remedy = error.remedy if error and error.remedy else "mend what its log says"
    again = "" if "apply again" in remedy else ", then apply again"
    return RunFailed(
        f"{cause}{why}; the last lines of {log}:\n{lines}",
        remedy=f"{remedy}{again}: the run goes on from its newest checkpoint",
        exit_code=EXIT_FINAL if outcome.kind == "stopped" else EXIT_USER_ERROR,
    )


def write_summary(
    run_dir: Path, wall_s: float, warn: Callable[[str], None]
) -> dict[str, Any] | None:
    """Write summary.json and report.html of the steps trained so far.

    Args:
        run_dir: the run directory.
        wall_s: seconds that the run was up, over all its sessions.
        warn: called with a line if the page cannot be made. It shows what strangers sent, which
            must not decide how a run ends.

    Returns:
        The summary; None, and nothing written, while no step has been trained.
    """
    rows = read_rows(run_dir)
    if not rows:
        return None
    summary = summarise(rows, wall_s=wall_s, **bytes_sent(run_dir))
    summary["evaluations"] = summarise_evaluations(results_of(run_dir, rows))
    write_atomic(run_dir / SUMMARY_FILE, json.dumps(summary, indent=2).encode() + b"\n")
    # Drawn in here: numpy and tokenizers, which a run's other processes do not wait for.
    from runspec.local.dashboard.page import PageData, exported_page
    from runspec.local.dashboard.source import FolderSource

    try:
        view = PageData(FolderSource(run_dir))
        view.refresh(read_s=MAX_READ_S)
        page = exported_page([view], MAX_REPORT_BYTES).encode()
    except Exception as error:  # noqa: BLE001 - whatever a stranger's files lead to
        warn(f"{REPORT_FILE} is not written: {describe_error(error, 'runspec')}")
    else:
        write_atomic(run_dir / REPORT_FILE, page)
    return summary
