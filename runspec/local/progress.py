"""How far a run is, by its files, the coordinator's status and the logs of its roles."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runspec.core.errors import one_line
from runspec.core.run_files import METRICS_FILE, evaluation_files, step_folder
from runspec.core.schema import RunSpec
from runspec.core.schema.role_names import EVALUATOR
from runspec.local.backend import STARTING, last_lines
from runspec.local.diagnosis import alarm_text, dropped_text, result_line, unsolved_text
from runspec.local.endpoints import coordinator_status
from runspec.local.fleet import Reached
from runspec.local.metrics import JsonLines, Row, latest_by_step
from verify.formats.batch import FILE_NAME as BATCH_FILE
from verify.formats.documents import read_evaluations

_LOG_LINES = 2000
_MAX_THING, _MAX_REMEDY = 800, 600
# Time, level and role before the message, as `runspec.core.process.setup_logging` writes them.
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ ([A-Z]) (?:sampler )?\S+ (.*)")
_TRACEBACK = "Traceback (most recent call last):"
_REMEDY = "  remedy: "
_OWN_LINE = re.compile(r"--- |\d{4}-\d\d-\d\d [\d:,]+ [A-Z] ")
"""How lines of a log begin that a role, or its start, has written: libraries write there too."""
_STAGE = re.compile(r"\b(loading vLLM|compiling the step)\b")
_STAGE_LINES = 1000


@dataclass(frozen=True)
class RoleError:
    """An error for people; each text is one printable line."""

    thing: str
    """The fault, with its place."""
    remedy: str = ""


def last_error(log: Path) -> RoleError | None:
    """Returns the last error of a role since its last start; None where its log has none.

    That is a line logged as an error, with the remedy below it, or the last line of a traceback.
    """
    found: RoleError | None = None
    in_traceback = False
    for line in last_lines(log, _LOG_LINES):
        logged = _LOGGED.match(line)
        if line.startswith(STARTING):
            found, in_traceback = None, False
        elif logged is not None:
            in_traceback = False
            if logged[1] in "EC":
                found = RoleError(one_line(logged[2], _MAX_THING))
        elif line == _TRACEBACK:
            in_traceback = True
        elif in_traceback and line and not line[0].isspace():
            found, in_traceback = RoleError(one_line(line, _MAX_THING)), False
        elif found is not None and line.startswith(_REMEDY):
            found = replace(found, remedy=one_line(line.removeprefix(_REMEDY), _MAX_REMEDY))
    return found


def stages(logs: Path) -> dict[str, str]:
    """The roles whose newest line of their own says that they are at something long, and what."""
    found = {}
    for log in sorted(logs.glob("*.log")):
        own = (line for line in reversed(last_lines(log, _STAGE_LINES)) if _OWN_LINE.match(line))
        if stage := _STAGE.search(next(own, "")):
            found[log.stem] = stage[1]
    return found


ASK_EVERY_S = 2.0
_MAX_FAULT = 400


class RunProgress:
    """Watches a run; `poll` is cheap enough for many times a second.

    Args:
        run_dir: the run directory.
        spec: its resolved spec.
        coordinator: base URL of the coordinator.
    """

    def __init__(self, run_dir: Path, spec: RunSpec, coordinator: str) -> None:
        self._coordinator = coordinator
        self._asked_at = time.monotonic()
        self.note = ""
        """Failures of the grader, roles in a long stage, and what the coordinator waits for."""
        self._logs = run_dir / "logs"
        self._run_dir = run_dir
        self._told = set(evaluation_files(run_dir))
        """Files of the evaluations that `news` has told of, or that were there before."""
        self._alarmed: set[Callable[[Row], str]] = set()
        self._dropped, self._dropped_told = (0, ""), 0
        """Groups dropped by the grader, what it failed with last, and how many were told of."""
        self._lines = JsonLines(run_dir / METRICS_FILE)
        self.rows: list[dict[str, Any]] = []
        """A row a trained step, in order."""
        self._steps = spec.steps
        self._last_batch = step_folder(run_dir, spec.steps - 1) / BATCH_FILE
        versions = run_dir / "store" / "origin" / spec.name / "versions"
        self._last_version = versions / str(spec.steps) / "manifest.json"

    def poll(self) -> Reached:
        now = time.monotonic()
        if now - self._asked_at >= ASK_EVERY_S:
            self._asked_at = now
            self._ask()
        if new := self._lines.new_rows():
            self.rows = latest_by_step([*self.rows, *new])
        return Reached(
            stepped=bool(new),
            sampled=self._last_batch.exists(),
            trained=bool(self.rows) and self.rows[-1]["step"] >= self._steps - 1,
            published=self._last_version.exists(),
        )

    def _ask(self) -> None:
        status = coordinator_status(self._coordinator)
        waiting_for, dropped = status.get("waiting_for"), status.get("dropped_by_grader")
        if isinstance(dropped, dict) and isinstance(groups := dropped.get("groups"), int):
            self._dropped = (groups, one_line(str(dropped.get("newest")), _MAX_FAULT))
        notes = [dropped_text(*self._dropped)] if self._dropped[0] else []
        notes += [f"{role}: {stage}" for role, stage in stages(self._logs).items()]
        notes += [f"waiting for {waiting_for}"] if waiting_for else []
        self.note = "; ".join(notes)

    def news(self) -> Iterator[tuple[str, str, str]]:
        """Yield role, text and kind of what happened in the run since the last call.

        An alarm of the newest step comes once until it is over, an evaluation once, and groups that
        the grader dropped whenever their number has doubled.
        """
        for alarm in (alarm_text, unsolved_text):
            text = alarm(self.rows[-1]) if self.rows else ""
            if text and alarm not in self._alarmed:
                yield "learner", text, "alarm"
            (self._alarmed.add if text else self._alarmed.discard)(alarm)
        new = [path for path in evaluation_files(self._run_dir) if path not in self._told]
        self._told.update(new)
        for result in read_evaluations(new):
            yield EVALUATOR, f"{result.evaluation} of {result_line(result)}", "result"
        if self._dropped[0] >= max(1, 2 * self._dropped_told):
            self._dropped_told = self._dropped[0]
            yield "coordinator", dropped_text(*self._dropped), "alarm"


class StageProgress:
    """A stage before the run, done once the file that it makes is there.

    It has the attributes of `RunProgress`.
    """

    rows: Sequence[Row] = ()

    def __init__(self, product: Path, log: Path) -> None:
        self._product = product
        self._log = log

    @property
    def note(self) -> str:
        """The last line that the stage has logged, without its time and level."""
        return re.sub(r"^\S+ \S+ [A-Z] ", "", "".join(last_lines(self._log, 1)))

    def poll(self) -> Reached:
        there = self._product.exists()
        return Reached(sampled=there, trained=there, published=there)

    def news(self) -> tuple[()]:
        return ()


Progress = RunProgress | StageProgress
"""Progress of the run itself, apart from its processes."""
