"""The ledger, the state that follows from it, and the waiting for its changes.

A transition is: decide (pure), append to the ledger (synced), replace the state, wake all who
wait. Everything happens in one event loop, and there is no `await` between a decision and its
record, so no two transitions mix; an append that fails leaves state and ledger as they were.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runspec.core.errors import NotNow, UserError
from runspec.core.files import remove_leftovers, write_atomic
from runspec.core.process import RunStopped
from runspec.core.run_files import STATE_FILE, SubmissionFiles, step_folder, submission_files
from verify.coordinator.machine.consequences import recorded
from verify.coordinator.machine.events import CoordinatorStarted, Event, RolledBack, StepClosed
from verify.coordinator.machine.history import History
from verify.coordinator.machine.state import Policy, State
from verify.coordinator.machine.transitions import apply
from verify.formats import batch as batch_format
from verify.ledger import Ledger
from verify.timeouts import STORAGE_S

_log = logging.getLogger(__name__)
_SHORTEST_WAIT_S = 0.001


class Finished(Exception):
    """The last batch is closed: there is nothing left to lease or to judge."""


class Journal:
    """Opens a run's ledger and makes the files beside it agree.

    Args:
        run_dir: holds state.db and rollouts/.
        policy: of the run's spec.
        ledger: the run's; None: in its state.db.
        clock: seconds since the epoch.

    Raises:
        UserError: the ledger cannot be read.
        RunStopped: there is a batch that the ledger knows nothing of.
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
        self._trouble: dict[str, float] = {}
        """Since when each place cannot be written."""
        self.ledger.own()  # first: another's files on their way look like those of a killed process
        self._recover()
        self.record(CoordinatorStarted(self.clock()))

    def record(self, event: Event) -> None:
        """Records an event and its consequences durably, then wakes all who wait.

        Raises:
            NotNow: it cannot be written just now; nothing has changed.
            UserError: nothing can be written, or not for longer than `STORAGE_S`.
        """
        state, events = recorded(self.state, event)
        try:
            self.ledger.append(events)
        except NotNow as error:
            self.put_off(error)
            raise
        self.written(self.ledger.place)
        self.state = state
        for new in events:
            self.history.take(new, state.leases)
        for follows in events[1:]:
            _log.warning("%s", follows)
        waiting, self._changed = self._changed, asyncio.Event()
        waiting.set()

    @contextmanager
    def recording(self, *files: Path) -> Iterator[None]:
        """Around the making of files and the record of their row: without the row, no file either.

        Where nobody can say whether there is a row, they stay: the next start knows. Nor are they
        written over until it is known.

        Raises:
            NotNow, UserError: as of `record`.
        """
        try:
            self.ledger.settle()
        except NotNow as error:
            self.put_off(error)
            raise
        try:
            yield
        except BaseException:
            if not self.ledger.in_doubt:
                for path in files:
                    path.unlink(missing_ok=True)
            raise

    def put_off(self, error: NotNow) -> None:
        """Records that something could not be written and is tried again later.

        Raises:
            UserError: that has gone on for longer than `STORAGE_S`.
        """
        now, place = self.clock(), error.place
        if place not in self._trouble:
            self._trouble[place] = now
            _log.warning("waiting for %s to be written: %s", place, error.thing)
        elif now - self._trouble[place] > STORAGE_S:
            raise UserError(error.thing, place=error.place, remedy=error.remedy) from error

    def written(self, place: str) -> None:
        """Records that a place can be written again."""
        if self._trouble.pop(place, None) is not None:
            _log.info("%s can be written again", place)

    async def change(self, deadline: float | None, *, due: float | None = None) -> bool:
        """Waits for the next event, until `deadline` or `due` at the latest.

        Returns:
            False when `deadline` has passed or the coordinator stops; else there may be news.
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
        """Ends all waiting."""
        self._stopping = True
        self._changed.set()

    def close(self) -> None:
        self.ledger.close()

    def batch_path(self, step: int) -> Path:
        return step_folder(self.run_dir, step) / batch_format.FILE_NAME

    def _recover(self) -> None:
        """Folds the ledger and makes the files agree with it."""
        lost: dict[int, str] = {}
        for event in self.ledger.events():
            self.state = apply(self.state, event)
            self.history.take(event, self.state.leases)
            if isinstance(event, StepClosed) and not self.batch_path(event.step).exists():
                lost[event.step] = event.document
            elif isinstance(event, RolledBack):  # the files that it took away stay away
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
        """Removes files that a killed process had received and not yet recorded."""
        # Of older steps the state has forgotten leases, and nothing can be on its way.
        steps = range(max(0, self.state.oldest_remembered), self.state.next_step)
        expected: dict[int, set[Path]] = {step: set() for step in steps}
        for record in self.state.leases.values():
            step = record.lease.step
            if record.submission is not None and step in expected:
                files = submission_files(self.run_dir, step, record.submission)
                expected[step] |= _paths(files, judged=record.verdict is not None)
        for step, paths in expected.items():
            folder = step_folder(self.run_dir, step)
            remove_leftovers(folder)
            for path in folder.glob("*"):
                unknown_file = path not in paths and not path.is_dir()
                if unknown_file and path.name != batch_format.FILE_NAME:
                    _log.warning("removing %s, which the ledger does not know", path)
                    path.unlink()


def _paths(files: SubmissionFiles, *, judged: bool) -> set[Path]:
    submitted = {files.submission, files.submission_envelope}
    return submitted | ({files.verdict, files.verdict_envelope} if judged else set())
