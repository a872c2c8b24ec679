"""The ledger, the state that follows from it, and waiting for its changes.

A transition decides (pure), appends to the ledger (synced), replaces the state and wakes all that
wait. Everything happens in one event loop, with no `await` between a decision and its record, so
two transitions never mix. An append that fails changes neither state nor ledger.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from runspec.core.errors import NotNow, UserError
from runspec.core.files import remove_leftovers, write_atomic
from runspec.core.process import RunStopped
from runspec.core.run_files import STATE_FILE, step_folder, submission_files
from verify import STORAGE_S
from verify.coordinator.ledger import Ledger
from verify.coordinator.machine.consequences import recorded
from verify.coordinator.machine.events import CoordinatorStarted, Event, RolledBack, StepClosed
from verify.coordinator.machine.state import Policy, State
from verify.coordinator.machine.transitions import apply
from verify.coordinator.machine.verdicts import History
from verify.formats import batch as batch_format

_log = logging.getLogger(__name__)
_SHORTEST_WAIT_S = 0.001


class Finished(Exception):
    """Raised when the last batch is closed: nothing is left to lease or to judge."""


class Journal:
    """Opens a run's ledger and makes the files beside it agree.

    Args:
        run_dir: holds state.db and rollouts/.
        policy: policy of the run's spec.
        ledger: ledger of the run; None: the one in its state.db.
        clock: returns seconds since the epoch.

    Raises:
        UserError: the ledger cannot be read.
        RunStopped: a batch file exists that the ledger does not have.
    """

    def __init__(
        self,
        run_dir: Path,
        policy: Policy,
        *,
        ledger: Ledger | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run_dir, self.clock = run_dir, clock
        self.state, self.history = State(policy), History()
        self.ledger = ledger or Ledger(run_dir / STATE_FILE)
        self._changed = asyncio.Event()
        self._stopping = False
        self._together: list[Event] | None = None
        """Events of a block that are recorded at its end."""
        self._trouble: dict[str, float] = {}
        """For each location that cannot be written, the time since then."""
        # First, because files that another process receives look like those of a killed process.
        self.ledger.own()
        self._recover()
        self.record(CoordinatorStarted(self.clock()))

    def record(self, event: Event) -> None:
        """Record an event and its consequences durably, then wake all that wait.

        Raises:
            NotNow: the ledger cannot be written now; nothing has changed.
            UserError: it cannot be written at all, or not for longer than `STORAGE_S`.
        """
        state, events = recorded(self.state, event)
        if self._together is not None:
            self._together += events
            self.state = state
            return
        self._append(state, events)
        for follows in events[1:]:
            _log.warning("%s", follows)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Record the events of the block in one transaction at its end: all or none.

        Raises:
            NotNow, UserError: as `record` does; the state is that before the block.
        """
        before, self._together = self.state, []
        try:
            yield
            if self._together:
                self._append(self.state, self._together)
        except BaseException:
            self.state = before
            raise
        finally:
            self._together = None

    def _append(self, state: State, events: Sequence[Event]) -> None:
        with self._putting_off():
            self.ledger.append(events)
        self.written(self.ledger.place)
        self.state = state
        for new in events:
            self.history.take(new, state.leases)
        waiting, self._changed = self._changed, asyncio.Event()
        waiting.set()

    @contextmanager
    def recording(self, *files: Path) -> Iterator[None]:
        """Remove the files that the block writes, unless it records their row.

        If it is unknown whether the ledger has the row, the files stay, and the next start decides.
        Until it is known, the block is not entered.

        Raises:
            NotNow, UserError: as `record` does.
        """
        with self._putting_off():
            self.ledger.settle()
        try:
            yield
        except BaseException:
            if not self.ledger.in_doubt:
                for path in files:
                    path.unlink(missing_ok=True)
            raise

    @contextmanager
    def _putting_off(self) -> Iterator[None]:
        try:
            yield
        except NotNow as error:
            self.put_off(error)
            raise

    def put_off(self, error: NotNow) -> None:
        """Note that a write failed and will be tried again.

        Raises:
            UserError: writes to this location have failed for longer than `STORAGE_S`.
        """
        now, place = self.clock(), error.place
        if place not in self._trouble:
            self._trouble[place] = now
            _log.warning("waiting for %s to be written: %s", place, error.thing)
        elif now - self._trouble[place] > STORAGE_S:
            raise UserError(error.thing, place=error.place, remedy=error.remedy) from error

    def written(self, place: str) -> None:
        """Note that a location can be written again."""
        if self._trouble.pop(place, None) is not None:
            _log.info("%s can be written again", place)

    async def change(self, deadline: float | None, *, due: float | None = None) -> bool:
        """Wait for the next event, until `deadline` or `due` at the latest.

        Returns:
            False if `deadline` has passed or the coordinator stops, else True.
        """
        now = self.clock()
        if self._stopping or (deadline is not None and now >= deadline):
            return False
        ends = [end for end in (deadline, due) if end is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(max(_SHORTEST_WAIT_S, min(ends) - now) if ends else None):
                await self._changed.wait()
        return not self._stopping

    def stop(self) -> None:
        """End all waiting."""
        self._stopping = True
        self._changed.set()

    def close(self) -> None:
        self.ledger.close()

    def batch_path(self, step: int) -> Path:
        return step_folder(self.run_dir, step) / batch_format.FILE_NAME

    def _recover(self) -> None:
        """Fold the ledger and make the files agree with it."""
        lost: dict[int, str] = {}
        for event in self.ledger.events():
            self.state = apply(self.state, event)
            self.history.take(event, self.state.leases)
            if isinstance(event, StepClosed) and not self.batch_path(event.step).exists():
                lost[event.step] = event.document
            elif isinstance(event, RolledBack):  # do not write the files that it removed
                lost = {s: document for s, document in lost.items() if s < event.version}
        for step, document in lost.items():
            write_atomic(self.batch_path(step), document.encode())
        unknown = self.batch_path(self.state.next_close)
        if unknown.exists():
            raise RunStopped(
                f"a batch of step {self.state.next_close}, which the ledger has not closed",
                place=str(unknown),
                remedy=f"restore {STATE_FILE}, or delete the run",
            )
        self._remove_unknown_files()

    def _remove_unknown_files(self) -> None:
        """Remove files that a killed process had received and not recorded."""
        # Older steps are skipped: the state has forgotten their leases, and none can be uploaded.
        steps = range(max(0, self.state.oldest_remembered), self.state.next_step)
        expected: dict[int, set[Path]] = {step: set() for step in steps}
        for record in self.state.leases.values():
            step = record.lease.step
            if record.submission is not None and step in expected:
                files = submission_files(self.run_dir, step, record.submission)
                expected[step] |= {files.submission, files.submission_envelope}
                if record.verdict is not None:
                    expected[step] |= {files.verdict, files.verdict_envelope}
        for step, paths in expected.items():
            folder = step_folder(self.run_dir, step)
            remove_leftovers(folder)
            for path in folder.glob("*"):
                unknown_file = path not in paths and not path.is_dir()
                if unknown_file and path.name != batch_format.FILE_NAME:
                    _log.warning("removing %s, which the ledger does not know", path)
                    path.unlink()
