"""Plans what applying a spec would do on this machine; takes no lock and writes nothing in the run.

Some changes make another run. A run may become that other run before its first step: the learner
writes version s + 1 before anything else of step s, so a run without a version after 0 has nothing
to lose.

The problems of a run are read, and its graders tried, by `python -m sampler check`; the documents
of a run that samples nothing are opened by `python -m learner_jax check`. The plug-ins are imported
there: runspec imports none.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.process import EXIT_FINAL, SUPERVISOR
from runspec.core.run_files import params_folder, versions_in, weights_folder
from runspec.core.schema import RunSpec
from runspec.core.schema.load import FILE_NAME, dump_resolved, load_resolved, spec_digest
from runspec.core.schema.load import FILE_NAME as SPEC_FILE
from runspec.local.backend import AT_TRUNK, LOCAL, last_lines
from runspec.local.machine import Machine, find_files, look, module_is_installed
from runspec.local.metrics import read_rows
from runspec.local.model_folders import full_states
from runspec.local.preflight import Missing, missing
from runspec.local.run_dir import holder
from runspec.local.state import RunState
from runspec.local.supervisor import describe_exit
from runspec.plan import Change, Seen, difference, of_class

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
    held_by, before = holder(run_dir), load_resolved(run_dir)
    changes = _without_past(difference(before, spec), before, spec, run_dir)
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
    since = ""
    if (plan.run_dir / SPEC_FILE).exists():
        with closing(RunState(plan.run_dir)) as state:
            rows = [row for row in state.applied() if row.serial > plan.approved.serial]
        since = "".join(f"\n  serial {row.serial}: {line}" for row in rows for line in row.what)
    saw, now = _words(plan.approved), _words(plan.seen)
    raise StalePlan(
        f"the plan is stale: it saw {saw}, now there is {now}{since}",
        place=str(plan.run_dir),
        remedy="plan again, and look at the new plan",
    )


def _words(seen: Seen) -> str:
    if seen.spec_digest is None:
        return "no such run"
    return f"serial {seen.serial} with spec {seen.spec_digest[:12]}"


def _without_past(
    changes: list[Change], before: RunSpec, after: RunSpec, run_dir: Path
) -> list[Change]:
    """The changes; those of settings by which a step was trained get the class newrun."""
    if before.changes == after.changes:
        return changes
    trained = trained_steps(run_dir)
    past = [[each for each in spec.changes if each.step < trained] for spec in (before, after)]
    if past[0] == past[1]:
        return changes
    reason = f"{trained} steps are trained: {trained} is the first step that may change"
    return [
        replace(change, change_class="newrun", reason=reason)
        if change.path.partition(".")[0] == "changes"
        else change
        for change in changes
    ]


def trained_steps(run_dir: Path) -> int:
    """Number of steps that a run has trained.

    Raises:
        UserError: its spec cannot be read.
    """
    spec = load_resolved(run_dir)
    versions = (*versions_in(params_folder(run_dir, spec)), *versions_in(weights_folder(run_dir)))
    states = (each.step for each in full_states(run_dir, spec))
    rows = (int(row["step"]) + 1 for row in read_rows(run_dir)[-1:])
    return max((*versions, *states, *rows), default=0)


def takes_any_change(run_dir: Path) -> bool:
    """Whether a run has trained no step. One whose root others have pinned takes no such change:
    they may hold its version 0, and a version number is published once.

    Raises:
        UserError: its spec cannot be read.
    """
    spec = load_resolved(run_dir)
    trained = trained_steps(run_dir) > 0 or full_states(run_dir, spec)
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


SILENCE_S = 300.0
"""Longest time without a line in its log, in seconds: a plug-in may be slow to import, and rows are
reported every five seconds."""
SHOWN_AFTER_S = 3.0
"""Seconds after which its progress is shown."""
MODULES = ("sampler", "numpy", "tokenizers", "pyarrow")
"""Packages that the check imports."""
_INFORMS = " I check "
"""Before what its log says at level INFO (`runspec.core.process.setup_logging`)."""
_LOG, _REPORT = "log", "report.json"
_POLL_S = 0.05
_MAX_REPORT_BYTES = 1 << 20
_LINES = 10


@dataclass(frozen=True)
class CheckedProblems:
    """The result of a check."""

    lacking: Sequence[Missing]
    notes: Sequence[str]
    """A line for each source: how many problems there are, and how many are left out."""


def absent_modules(is_installed: Callable[[str], bool] = module_is_installed) -> list[str]:
    """Packages that the check imports and this machine lacks."""
    return [name for name in MODULES if not is_installed(name)]


def with_problems(plan: RunPlan, machine: Machine, say: Callable[[str], None]) -> RunPlan:
    """The plan, with what its problems and graders lack, for a run that is new or changed.

    Not looked at where something else is lacking, or the packages that read problems; nor in a run
    that is alive or goes on as it was: its problems were read when it was started.
    """
    as_it_was = plan.held_by is not None or not (plan.new or plan.changes)
    if plan.lacking or as_it_was or absent_modules():
        return plan
    checked = check_problems(plan.spec, machine, say)
    for note in checked.notes if not checked.lacking else ():
        say(note)
    return replace(plan, lacking=checked.lacking)


def check_problems(
    spec: RunSpec, machine: Machine, say: Callable[[str], None], *, silence_s: float = SILENCE_S
) -> CheckedProblems:
    """Reads every row of a run's sources and tries its graders, in a process of its own.

    Of documents it reads the first of each file; nothing grades them.

    Args:
        spec: with whole paths (`runspec.cli.checks.located`).
        machine: this one.
        say: called with a line of progress, once the check takes more than a few seconds.
        silence_s: longest time without a line in the log of the process, which is then ended.

    Returns:
        What the run lacks; where the process died or hung, that, with the last lines of its log.
    """
    found = find_files(spec.model, machine.env)
    tokenizer = found.model if spec.model.tokenizer is None else found.tokenizer
    with TemporaryDirectory(prefix="runspec-check-") as name:
        folder = Path(name)
        (folder / FILE_NAME).write_bytes(dump_resolved(spec))
        graded = spec.supervised is None
        role = "sampler" if graded else "learner_jax"
        command = machine.module(role, "check", str(folder))
        if graded and tokenizer is not None:
            command += ("--model", str(tokenizer))
        what = "problems" if graded else "documents"
        end = _run(command, folder, lambda line: say(f"reading the {what}: {line}"), silence_s)
        if end:
            lines = "".join(f"\n  | {line}" for line in last_lines(folder / _LOG, _LINES))
            thing = f"`python -m {role} check` {end}; its last lines:{lines}"
            cause = "plug-in" if graded else "file"
            died = Missing("data.sources", thing, f"mend the {cause} that they name")
            return CheckedProblems([died], [])
        told = json.loads(read_bounded(folder / _REPORT, _MAX_REPORT_BYTES))
        lacking = [Missing(each["place"], each["thing"], each["remedy"]) for each in told["faults"]]
        return CheckedProblems(lacking, told["notes"])


def _run(command: Sequence[str], folder: Path, say: Callable[[str], None], silence_s: float) -> str:
    """Runs the process, its report and its log in `folder`; says how it failed, or nothing."""
    log = folder / _LOG
    with (folder / _REPORT).open("wb") as report, log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=report,
            stderr=errors,
            env={**os.environ, SUPERVISOR: str(os.getpid()), "RUNSPEC_LOG_LEVEL": "INFO"},
            start_new_session=True,
        )
    started = heard = time.monotonic()
    said, size = "", 0
    try:
        while process.poll() is None:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if log.stat().st_size != size:
                size, heard = log.stat().st_size, now
            if now - heard > silence_s:
                return f"said nothing for {silence_s:.0f} s"
            told = [line.partition(_INFORMS)[2] for line in last_lines(log, _LINES)]
            line = next((text for text in reversed(told) if text), "")
            if now - started > SHOWN_AFTER_S and line not in ("", said):
                said = line
                say(line)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return describe_exit(process.returncode) if process.returncode else ""
