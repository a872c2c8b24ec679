"""Follows a run, and sends what it shows to a tool: each thing once, also after a crash."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runspec.core.canonical import parse_object
from runspec.core.entry_points import entry_points_of
from runspec.core.errors import UserError, describe_error
from runspec.core.files import expand_user
from runspec.core.process import EXIT_USER_ERROR, not_retried
from runspec.core.run_files import monitor_folder
from runspec.core.spec.plugins import MONITOR_GROUP
from runspec.core.spec.resolved import MAX_BYTES, dump_resolved
from runspec.core.spec.schema import Monitor as MonitorSpec
from runspec.core.spec.schema import RunSpec
from runspec.local.monitors.feed import Feed, Item, last_keys
from runspec.local.monitors.interface import Monitor, Target
from runspec.local.monitors.journal import Journal
from runspec.local.run_dir import hold, holder

POLL_S = 2.0
_AT_ONCE = 100
"""Entries between two flushes."""


def follow(
    run_dir: Path, spec: RunSpec, setting: MonitorSpec, stop: threading.Event, log: logging.Logger
) -> None:
    """Sends until everything is sent, the run has ended, or `stop` is set.

    After a rollback, or where the tool has more than was sent to it, another record begins, with
    everything that the run has.

    Raises:
        UserError: the tool failed; everything is as if this process had been killed.
        RunStopped: the tool cannot work here.
    """
    folder = monitor_folder(run_dir, setting.name)
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder, role=f"monitor-{setting.name}"):
        feed, journal = Feed(run_dir), Journal(folder, spec.name)
        ends = _ends(run_dir, stop)
        items = {item.key: item for item in feed.look(last=ends)}
        if not journal.agrees(items):
            journal.begin()
        sender = _Sender(setting, spec, folder, journal, log)
        sender.start()
        sender.numbered(items)
        while True:
            sender.send([item for key, item in items.items() if key not in journal.keys])
            if ends:
                break
            stop.wait(POLL_S)
            ends = last_keys(spec) <= journal.keys or _ends(run_dir, stop)
            items = {item.key: item for item in feed.look(last=ends)}
        sender.close()
        log.info("%d entries sent to %s", len(journal.entries), journal.record)


def _ends(run_dir: Path, stop: threading.Event) -> bool:
    """Whether the run writes nothing any more that this process would wait for."""
    return stop.is_set() or holder(run_dir) is None


class _Sender:
    """Calls the plug-in, with a deadline for each call."""

    def __init__(
        self,
        setting: MonitorSpec,
        spec: RunSpec,
        folder: Path,
        journal: Journal,
        log: logging.Logger,
    ) -> None:
        self._setting, self._spec, self._journal, self._log = setting, spec, journal, log
        self._folder = folder if setting.dir is None else expand_user(Path(setting.dir)).absolute()
        self._monitor = load_monitor(setting)
        self._next = 0
        """Number of the next entry that the tool gets."""

    def start(self) -> None:
        """Opens the journal's record, and another one if the tool has more than the journal."""
        for _ in range(2):
            with self._call("start"):
                found = self._monitor.start(self._target())
            self._next = self._journal.sent if found is None else found
            if self._next <= len(self._journal.entries):
                break
            self._log.warning(
                "%s has %d entries, %d were sent: another record begins",
                *(self._journal.record, self._next, len(self._journal.entries)),
            )
            with self._call("close"):
                self._monitor.close()
            self._journal.begin()
            self._monitor = load_monitor(self._setting)
        self._log.info("logs to %s from entry %d on", self._journal.record, self._next)

    def numbered(self, items: dict[str, Item]) -> None:
        """Sends the entries that have a number and that the tool lacks."""
        lacking = self._journal.entries[self._next :]
        self._send([items[key] for key, _ in lacking])

    def send(self, items: list[Item]) -> None:
        """Numbers and sends things, in parts, each of which is flushed."""
        for begin in range(0, len(items), _AT_ONCE):
            part = items[begin : begin + _AT_ONCE]
            self._journal.add(part)
            self._send(part)

    def close(self) -> None:
        with self._call("close"):
            self._monitor.close()

    def _send(self, items: list[Item]) -> None:
        for begin in range(0, len(items), _AT_ONCE):
            with self._call("send"):
                for item in items[begin : begin + _AT_ONCE]:
                    self._monitor.send(item.numbered(self._next))
                    self._next += 1
                self._monitor.flush()
            self._journal.flushed(self._next)

    def _target(self) -> Target:
        spec = parse_object(dump_resolved(self._spec), max_bytes=MAX_BYTES)
        record = self._journal.record
        return Target(self._spec.name, record, spec, self._setting, self._folder)

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        """Ends the process where a call hangs; turns what a plug-in raises into one message."""
        kind, deadline = self._setting.kind, self._setting.deadline
        timer = threading.Timer(
            deadline, self._hangs, [f"{kind}: {what} takes over {deadline:g} s"]
        )
        timer.daemon = True
        timer.start()
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{kind}: {what} failed: {describe_error(error)}",
                place=f"monitors.{self._setting.name}",
                remedy="the run goes on without it, and nothing is lost: mend what the message "
                "names; it is tried again by itself",
            ) from error
        finally:
            timer.cancel()

    def _hangs(self, message: str) -> None:
        self._log.error("%s: this process ends, to be started again", message)
        os._exit(EXIT_USER_ERROR)


@not_retried()
def load_monitor(setting: MonitorSpec) -> Monitor:
    """Return the plug-in of a kind.

    Raises:
        RunStopped: no installed package offers it, or it cannot be imported.
    """
    offered = {point.name: point for point in entry_points_of(MONITOR_GROUP)}
    if setting.kind not in offered:
        raise UserError(
            f"no installed package offers the kind {setting.kind!r}",
            place=f"monitors.{setting.name}",
            remedy=f"one of: {', '.join(sorted(offered))}",
        )
    made: Monitor = offered[setting.kind].load()()
    return made
