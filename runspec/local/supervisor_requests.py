"""Requests to the supervisor of a live run: `runspec apply` changes it, `runspec pause` stops it.

A request is a row in the run's state.db. The supervisor reads it in its next turn, and writes into
the row what it waits for and the outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from runspec.core.canonical import canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.spec.resolved import MAX_BYTES, dump_resolved, parse_resolved, spec_digest
from runspec.core.spec.role_names import elsewhere, validator_names, worker_names
from runspec.core.spec.schema import RunSpec
from runspec.local.fleet import Changed
from runspec.local.processes import PreparedRun, RoleSpec, roles_here
from runspec.local.run_dir import EXIT_LOCKED, holder, write_spec
from runspec.local.run_view import budget_limits
from runspec.local.state import RequestRow, RunState
from runspec.plan.changes import LIVE, Change, Readers, difference, roles_to_restart

CHANGE, PAUSE = "change", "pause"
TAKE_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 900.0
_MAX_REQUEST_BYTES = MAX_BYTES + 4096
_ASK_S = 0.1


class RequestRefused(UserError):
    """The supervisor refused a request, or was not there to take it."""

    exit_code = EXIT_LOCKED


Decision = tuple[Changed, Mapping[str, RoleSpec]] | None
"""A supervisor's decision on a request: a change, and how roles are started from now on; None: the
run is to pause."""


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
        roles_of: the processes of a run.
    """

    def __init__(
        self,
        run: PreparedRun,
        state: RunState,
        roles_of: Callable[[PreparedRun], Sequence[RoleSpec]],
    ) -> None:
        self.run = run
        self._state, self._roles_of = state, roles_of

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
        try:
            payload = parse_object(request.payload.encode(), max_bytes=_MAX_REQUEST_BYTES)
            new = parse_resolved(canonical_json(payload["spec"]), place="request")
            serial = int(payload["serial"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"not a change of a spec: {error}") from error
        return self._change(new, serial)

    def _change(self, new: RunSpec, serial: int) -> Decision:
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
        roles = self._roles_of(changed)
        write_spec(new, self.run.directory, roles_here(new))
        record_applied(self._state, new, changes)
        self.run = changed
        renew = readers_names(roles_to_restart(changes), new)
        if self._signed_roles() != signed_before:
            # A longer budget needs signatures that last as long; these two hand them out.
            renew = list(dict.fromkeys(["coordinator", "publisher", *renew]))
        change = Changed(new.placement.restarts, self.budget_ends_at(), tuple(renew))
        return change, {role.name: role for role in roles}

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
        "validators": validator_names(spec),
        "samplers": list(worker_names(spec)),
    }
    away = elsewhere(spec)
    return [name for reader in readers for name in names[reader] if name not in away]
