"""Supervises the roles of a run, and takes requests of others while it is up.

It tells `fleet` of processes and files, and carries out its actions. `runspec apply` changes a live
run and `runspec pause` stops it by a request, a row in the run's state.db: the supervisor reads it
in its next turn, and writes into the row what it waits for and the outcome.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from runspec.core.canonical import canonical_json, parse_object
from runspec.core.errors import UserError, reported
from runspec.core.schema import RunSpec, role_names
from runspec.core.schema.load import MAX_BYTES, dump_resolved, parse_resolved, spec_digest
from runspec.local.backend import Processes, birth
from runspec.local.fleet import Action, Changed, Fleet, Outcome, RoleState, Rules, State
from runspec.local.metrics import Row
from runspec.local.processes import PreparedRun, RoleSpec, roles_here
from runspec.local.progress import Progress, last_error
from runspec.local.run_dir import EXIT_LOCKED, holder, write_spec
from runspec.local.run_view import budget_limits
from runspec.local.state import RequestRow, RoleRow, RunState
from runspec.plan import LIVE, Change, Readers, difference, roles_to_restart

CHANGE, PAUSE = "change", "pause"
TAKE_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 900.0
_MAX_REQUEST_BYTES = MAX_BYTES + 4096
_ASK_S = 0.1


class RequestRefused(UserError):
    """The supervisor refused a request, or was not there to take it."""

    exit_code = EXIT_LOCKED


Decision = Changed | None
"""A supervisor's decision on a request; None: the run is to pause."""


def send_request(
    run_dir: Path,
    kind: str,
    payload: Mapping[str, Any],
    *,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Asks the supervisor of a live run for something, and waits until that is done.

    Args:
        run_dir: the run directory.
        kind: CHANGE with {"spec", "serial"}, or PAUSE with {}.
        payload: JSON.
        say: told whom the supervisor waits for, whenever that changes.

    Returns:
        What came of it.

    Raises:
        RequestRefused: it was refused, or nobody took it.
        UserError: it is not done in time; it goes on by itself.
    """
    started, said = time.monotonic(), ""
    with closing(RunState(run_dir)) as state:
        number = state.ask(kind, payload)
        while True:
            # Looked at before the answer: whoever ended may have answered just before.
            held_by = holder(run_dir)
            request = state.request(number)
            assert request is not None, "requests are never removed"
            if request.state == "done":
                return request.answer
            waited = time.monotonic() - started
            lost = held_by is None or (request.state == "asked" and waited > TAKE_TIMEOUT_S)
            if request.state == "refused" or lost:
                reason = f"its supervisor ({held_by or 'gone'}) did not take it"
                if request.state == "refused":
                    reason = request.answer
                elif request.state == "taken":  # what it wrote before it ended stays written
                    last = f"it had taken this on, and last said: {request.answer}"
                    reason = f"its supervisor is gone; {last}"
                state.answer(number, "refused", reason)
                remedy = "" if "remedy:" in reason else "look at its status, then again"
                raise RequestRefused(reason, place=str(run_dir), remedy=remedy)
            if request.answer and request.answer != said:
                say(said := request.answer)
            if waited > ANSWER_TIMEOUT_S:
                raise UserError(
                    f"not done after {waited:.0f} s: the supervisor {request.answer}",
                    place=str(run_dir),
                    remedy=f"it goes on by itself; watch it with `runspec status {run_dir}`",
                )
            time.sleep(_ASK_S)


def change_request(spec: RunSpec, serial: int) -> dict[str, Any]:
    """Payload of CHANGE: the new spec, and the serial of the state that it was compared with."""
    return {"spec": parse_object(dump_resolved(spec), max_bytes=MAX_BYTES), "serial": serial}


class LiveRun:
    """A run that is up, and how its spec changes. The supervisor's side.

    Args:
        run: as it starts; its spec.json is written anew before any role is told.
        state: where changes are recorded.
    """

    def __init__(self, run: PreparedRun, state: RunState) -> None:
        self.run, self._state = run, state

    def budget_ends_at(self) -> float | None:
        """When the budget is used up, on the monotonic clock; None for never."""
        hours = min(budget_limits(self.run.spec).values(), default=None)
        return None if hours is None else time.monotonic() + hours * 3600.0 - self._state.wall_s()

    def take(self, request: RequestRow) -> Decision:
        """Makes a request true on disk, and says what is left to do.

        Raises:
            UserError: it is refused; nothing has changed.
        """
        if request.kind == PAUSE:
            return None
        if request.kind != CHANGE:
            raise UserError(f"unknown request {request.kind!r}")
        with reported("not a change of a spec", "", "", ValueError, KeyError, TypeError):
            payload = parse_object(request.payload.encode(), max_bytes=_MAX_REQUEST_BYTES)
            new = parse_resolved(canonical_json(payload["spec"]), place="request")
            serial = int(payload["serial"])
        now = self._state.serial()
        if serial != now:
            raise UserError(f"the run has changed meanwhile: serial {now}, not {serial}")
        changes = difference(self.run.spec, new)
        stopped = [change for change in changes if change.change_class not in LIVE]
        if new.name != self.run.spec.name or stopped:
            raise UserError(
                "a live run does not take this over:" + "".join(f"\n  {c}" for c in stopped),
                remedy=f"`runspec pause {self.run.directory}`, then apply again",
            )
        signed_before = self._signed_roles()
        changed = self.run.changed(new)
        write_spec(new, self.run.directory, roles_here(new))
        record_applied(self._state, new, changes)
        self.run = changed
        renew = readers_names(roles_to_restart(changes), new)
        if self._signed_roles() != signed_before:
            # A longer budget needs signatures that last as long; these two hand them out.
            renew = list(dict.fromkeys(["coordinator", "publisher", *renew]))
        return Changed(new.placement.restarts, self.budget_ends_at(), tuple(renew))

    def _signed_roles(self) -> bytes:
        path = self.run.identity.roles_file
        return path.read_bytes() if path.exists() else b""


def record_applied(state: RunState, spec: RunSpec, changes: Sequence[Change]) -> int:
    """Raises the run's serial if its spec is another than before; returns the serial."""
    known, digest = state.applied(), spec_digest(spec)
    if known and known[-1].spec_digest == digest:
        return known[-1].serial
    what = [str(change) for change in changes] if known else []
    serial = state.add_applied(digest, what)
    for line in what:
        state.add_event("run", f"serial {serial}: {line}", "change")
    return serial


def readers_names(readers: Sequence[Readers], spec: RunSpec) -> list[str]:
    """The roles of this machine that read rolling fields, by name, in the order of their turns."""
    names = {
        "coordinator": ["coordinator"],
        "publisher": ["publisher"],
        "validators": role_names.validator_names(spec),
        "samplers": list(role_names.worker_names(spec)),
    }
    away = role_names.elsewhere(spec)
    return [name for reader in readers for name in names[reader] if name not in away]


POLL_S = 0.1
SEEN_EVERY_S = 2.0
_CRASH_TIMEOUT_S = 5.0


class Watcher(Protocol):
    """Shows a run to whoever started it."""

    def event(self, role: str, text: str, kind: str = "note") -> None:
        """Something happened; `EventRow` has the kinds."""

    def show(self, rows: Sequence[Row], roles: Sequence[RoleRow], note: str) -> None:
        """The state of things, several times a second."""


@dataclass(frozen=True)
class Session:
    """Context that the stages of one start of a run share."""

    processes: Processes
    """Starts and watches the roles."""
    logs: Path
    """Folder of the roles' logs."""
    state: RunState
    """Records every change."""
    watcher: Watcher
    stop_requests: Callable[[], int]
    """How many times the run was asked to stop; the second time kills."""
    take: Callable[[RequestRow], Decision]
    """Makes what others ask for true; raises UserError where it refuses."""


class Supervisor:
    """Keeps the roles of a run alive until it ends.

    Call it from the main thread, as `LocalProcesses` asks.

    Args:
        roles: what to keep alive.
        rules: restarts and deadlines.
        progress: asked for steps, every turn.
        session: where to log and record, whom to show it, who may interrupt.
    """

    def __init__(
        self, roles: Sequence[RoleSpec], rules: Rules, progress: Progress, session: Session
    ) -> None:
        self._specs = {role.name: role for role in roles}
        self._progress = progress
        self._session = session
        self._open: dict[RequestRow, str] = {}
        self._stops_handled = 0
        self._started: set[str] = set()
        """Roles whose end has not been seen."""
        self._pids: dict[str, int | None] = {}
        self._told: dict[str, RoleRow] = {}
        self._seen = 0.0
        self._fleet = Fleet({role.name: RoleState(role.policy) for role in roles}, rules)

    def run(self) -> Outcome:
        """Starts everything, watches it, and returns once no process is left.

        Raises:
            UserError: a process cannot be started, or the run's state cannot be written.
        """
        self._session.logs.mkdir(parents=True, exist_ok=True)
        try:
            while not self._fleet.done:
                looks = {name: self._session.processes.look(name) for name in self._started}
                self._session.processes.logs()
                # Looked at after the exits and handled before them: a worker ends because the last
                # step has its rollouts, so by then the file that says so is there.
                self._fleet.reached(self._progress.poll())
                for _ in range(self._session.stop_requests() - self._stops_handled):
                    self._stops_handled += 1
                    self._handle(self._fleet.interrupted)
                self._take()
                for name, look in looks.items():
                    code, self._pids[name] = look.exit_code, look.pid
                    if code is not None:
                        self._started.discard(name)
                        self._handle(partial(self._fleet.exited, name, code), {name: code})
                    elif look.ready and self._fleet.roles[name].state is State.STARTING:
                        self._handle(partial(self._fleet.ready, name))
                self._handle(self._fleet.tick)
                self._answer()
                self._report()
                if not self._fleet.done:
                    time.sleep(POLL_S)
        finally:
            self._session.processes.close(_CRASH_TIMEOUT_S)
        outcome = self._fleet.outcome
        assert outcome is not None, "a fleet is done only by an outcome"
        return outcome

    def _take(self) -> None:
        """Decides on new requests; each gets an answer, and no error ends the run."""
        for request in self._session.state.asked():
            try:
                taken = self._session.take(request)
            except UserError as error:
                self._session.state.answer(request.id, "refused", str(error))
                continue
            self._open[request] = ""
            if taken is None:
                self._handle(self._fleet.paused)
                continue
            self._fleet.changed(taken)

    def _answer(self) -> None:
        """Writes the progress and the outcome of open requests into their rows."""
        for request, said in list(self._open.items()):
            state, text = self._outcome_of(request)
            if text != said:
                self._open[request] = text
                self._session.state.answer(request.id, state, text)
            if state != "taken":
                del self._open[request]

    def _outcome_of(self, request: RequestRow) -> tuple[str, str]:
        fleet = self._fleet
        if request.kind == CHANGE:
            if fleet.outcome is not None:
                return "done", "the run ends; its next start has the change"
            if fleet.renewing is None and not fleet.to_renew:
                return "done", "taken over"
            waiting = [name for name in (fleet.renewing, *fleet.to_renew) if name]
            return "taken", f"waits for {', then '.join(waiting)} to run again"
        if fleet.outcome is not None and fleet.outcome.kind != "paused":
            return "refused", f"the run was ending by itself ({fleet.outcome.kind})"
        if fleet.done:
            return "done", "every role has ended"
        return "taken", f"waits for {', '.join(fleet.alive)} to end"

    def _handle(
        self, happened: Callable[[float], list[Action]], exits: Mapping[str, int] | None = None
    ) -> None:
        before = {name: role.state for name, role in self._fleet.roles.items()}
        processes = self._session.processes
        for action in happened(time.monotonic()):
            role = action.role
            if action.do == "start":
                self._session.state.storage(partial(processes.start, self._specs[role]))
                self._started.add(role)
                self._pids[role] = processes.look(role).pid
            else:
                processes.stop(role, signal.SIGTERM if action.do == "stop" else signal.SIGKILL)
        for name, state in self._fleet.roles.items():
            if state.state is not before[name]:
                # One role's end can stop the others too: the exit code is its own.
                self._tell(name, state, (exits or {}).get(name))

    def _tell(self, name: str, role: RoleState, code: int | None) -> None:
        pid = self._pids.get(name) if name in self._started else None
        born = birth(pid) if pid else None
        row = RoleRow(name, role.state, role.restarts, pid, born, time.time())
        self._told[name] = row
        self._session.state.set_role(row)
        text = _describe(role, pid, code, needed=not role.policy.may_fail)
        # Of a role that was killed the log says nothing about its end.
        if role.state in (State.BACKOFF, State.FAILED) and code is not None and code > 0:
            error = last_error(self._session.logs / f"{name}.log")
            text += f": {error.thing}" if error else ""
        if not self._fleet.keeps_dying(name):
            self._event(name, text, "state", code)

    def _event(self, name: str, text: str, kind: str, code: int | None = None) -> None:
        self._session.state.add_event(name, text, kind, code)
        self._session.watcher.event(name, text, kind)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._seen >= SEEN_EVERY_S or self._fleet.done:
            self._session.state.seen()
            self._seen = now
        for name, text, kind in self._progress.news():
            self._event(name, text, kind)
        roles = list(self._told.values())
        self._session.watcher.show(self._progress.rows, roles, self._progress.note)


def _describe(role: RoleState, pid: int | None, code: int | None, *, needed: bool) -> str:
    how = "" if code is None else f"{describe_exit(code)}, "
    match role.state:
        case State.STARTING:
            again = f", restart {role.restarts}" if role.restarts else ""
            where = f"process {pid}" if pid else "elsewhere"
            return f"starting ({where}{again})"
        case State.BACKOFF:
            return f"{how}starts again"
        case State.FAILED:
            if not needed:
                return f"{how}is not started again; the run goes on"
            given_up = f"given up after {role.deaths_in_a_row} in a row"
            return f"{how}{given_up if role.deaths_in_a_row else 'stops the run'}"
        case _:
            return f"{how}{role.state}"


def describe_exit(code: int) -> str:
    """An exit code in words; negative codes are signals."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
