"""Grader processes: started in the sandbox, or without it if none works; they answer over pipes."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.process import not_retried
from runspec.core.schema import Reward, RunSpec
from sampler import sandbox
from sampler.sandbox import PYTHON, Limits, NotIsolated, start
from sampler.tasks.interfaces import find_kind, reward_entry_point

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_PORTION = 1 << 16


class ChannelClosed(Exception):
    """The other side ended, or sent something that is not a message."""


class NoMessage(ChannelClosed):
    """The other side sent something that is not a message; it may still run."""


class Overdue(Exception):
    """The deadline passed before a message was received or sent."""


class Channel:
    """One side of a conversation with another process.

    Args:
        read_fd, write_fd: pipes; they are made non-blocking.
        max_bytes: longest line that is accepted.
    """

    def __init__(self, read_fd: int, write_fd: int, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._read_fd, self._write_fd, self._max_bytes = read_fd, write_fd, max_bytes
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self._buffer = bytearray()
        self._searched = 0

    def send(self, message: Any, deadline: float) -> None:
        """Write one line of JSON. Raises the errors of `send_line`."""
        self.send_line(json.dumps(message), deadline)

    def send_line(self, line: str, deadline: float) -> None:
        """Write a line that is JSON already.

        Raises:
            ChannelClosed: the other side has ended.
            Overdue: not sent by `deadline` (`time.monotonic`).
        """
        data = memoryview(line.encode() + b"\n")
        while data:
            self._wait(self._write_fd, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._write_fd, data[:_PORTION]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise ChannelClosed(f"cannot write: {error.strerror}") from error

    def receive(self, deadline: float) -> Any:
        """Read one line.

        Raises:
            ChannelClosed: the other side ended; `NoMessage`: it sent a line that is too long or
                is not JSON.
            Overdue: no whole line by `deadline` (`time.monotonic`).
        """
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > self._max_bytes:
                raise NoMessage(f"a message of more than {self._max_bytes} bytes")
            self._wait(self._read_fd, select.POLLIN, deadline)
            try:
                portion = os.read(self._read_fd, _PORTION)
            except BlockingIOError:
                continue
            if not portion:
                raise ChannelClosed("ended")
            self._buffer += portion
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise NoMessage("a message that is no JSON") from error

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise Overdue


_WARNING = threading.Lock()
_warned: set[str] = set()
START_S = 60.0
"""Seconds from the start of a grader to its first message; it imports its terms meanwhile."""
SEND_S = 30.0
LIMITS = Limits(
    wall_s=None,  # the pool limits the time of each answer
    cpu_s=None,
    memory_bytes=4 << 30,
    processes=32,
    file_bytes=64 << 20,
)
MAX_REPLY_BYTES = 1 << 20
"""Of a state and observations together, and of any grade."""
_BOOT = """\
import json, sys
from importlib.util import spec_from_file_location
paths, packages = json.loads(sys.argv[1])
class Packages:
    def find_spec(name, path=None, target=None):
        if name in packages:
            return spec_from_file_location(name, packages[name])
sys.path[:] = paths
sys.meta_path.insert(0, Packages)
from sampler.tasks.interfaces import main
main()
"""
"""Imports our packages and those of the plug-ins by their files, because the folders around them,
which may hold keys, are not readable in the sandbox."""


def mechanisms(*, required: bool, place: str) -> tuple[str, ...]:
    """Return the mechanisms that isolate a grader process; empty if only its limits can hold.

    Args:
        required: whether a sandbox is needed; else its absence is logged as a warning, once.
        place: the part of the spec that needs it, for messages.

    Raises:
        UserError: it is required, and none works.
    """
    if required:
        sandbox.require(place)
    report = sandbox.probe()
    if report.isolates:
        return report.working
    with _WARNING:  # several graders start at once, and each would warn
        if place not in _warned:
            _warned.add(place)
            logging.getLogger(__name__).warning(
                "%s: no sandbox works on this machine; answers are graded in processes without "
                "one. `python -m sampler.sandbox` names what to switch on (docs/sandbox.md, "
                "Making it work)",
                place,
            )
    return ()


def require_graders(spec: RunSpec) -> None:
    """Check that this machine may grade for a run: rewards that execute answers have a sandbox.

    Raises:
        UserError: no sandbox works; or `sandboxed: false` with an untrusted pool, or a kind of
            reward that no package offers.
    """
    untrusted = [pool.name for pool in spec.samplers if pool.trust == "untrusted"]
    for reward in spec.reward:
        kind = find_kind(reward.kind)
        if kind.role == "environment" and kind.determinism != "exact" and untrusted:
            raise UserError(
                f"kind {reward.kind} is not the same on every machine, and the pool "
                f"{untrusted[0]} is untrusted: a validator cannot replay its episodes",
                place=f"reward.{reward.name}.kind",
                remedy="trust the pool, or play an environment of determinism `exact`",
            )
        if kind.role == "length" or not kind.executes_answers:
            continue
        if untrusted and not reward.sandboxed:
            raise UserError(
                f"kind {reward.kind} would run, unconfined, what whoever runs the untrusted pool "
                f"{untrusted[0]} wrote",
                place=f"reward.{reward.name}.sandboxed",
                remedy="set it to true; docs/sandbox.md says what a machine needs",
            )
        if reward.sandboxed:
            sandbox.require(f"reward.{reward.name}")


class GraderLost(Exception):
    """A grader process can no longer be used: it died, hangs, or breaks the protocol."""

    def __init__(self, reason: str, *, overdue: bool = False) -> None:
        super().__init__(reason)
        self.overdue = overdue


class GraderProcess:
    """A grader process in the sandbox, with the terms of one run.

    Raises:
        UserError: it does not start.
        RunStopped: a term cannot be made in it.
    """

    def __init__(self, rewards: Sequence[Reward]) -> None:
        points = {reward.kind: reward_entry_point(reward) for reward in rewards}
        settings = {reward.kind: reward.model_dump(mode="json") for reward in rewards}
        packages, readable = _packages(points.values())
        # The interpreter's own entries, and folders of installed packages.
        paths = [
            path
            for path in sys.path
            if Path(path).exists()
            and (
                Path(path).is_relative_to(sys.base_prefix)
                or Path(path).name in ("site-packages", "dist-packages")
            )
        ]
        command = [*PYTHON, "-c", _BOOT, json.dumps([paths, packages])]
        try:
            self._isolated = isolated = start(
                command,
                limits=LIMITS,
                readable=[*readable, *map(Path, paths)],
                mechanisms=mechanisms(required=False, place="reward"),
            )
        except NotIsolated as error:
            raise _no_start(str(error)) from error
        self.stop = isolated.stop
        """Lets the process end without waiting for it; may be called by another thread."""
        self.kill = isolated.kill
        """Kills the process and all that it started."""
        pipes = isolated.stdout.fileno(), isolated.stdin.fileno()
        self._channel = Channel(*pipes, max_bytes=MAX_REPLY_BYTES)
        terms = {kind: (point.module, point.attr, settings[kind]) for kind, point in points.items()}
        try:
            self._guard(lambda: self._channel.send({"terms": terms}, time.monotonic() + START_S))
            failure = self.answer(START_S).get("failed")
        except GraderLost as error:
            self.kill()
            raise _no_start(str(error)) from error
        if failure is not None:
            self.kill()
            with not_retried():
                raise _no_start(str(failure))

    def ask(self, items: list[str]) -> None:
        """Send answers to grade, each as JSON.

        Raises:
            GraderLost: it does not receive them in time.
        """
        line = f"[{','.join(items)}]"
        self._guard(lambda: self._channel.send_line(line, time.monotonic() + SEND_S))

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the reply for the next of the answers sent.

        Raises:
            GraderLost: it died, broke the protocol, or took longer.
        """
        reply: Any = self._guard(lambda: self._channel.receive(time.monotonic() + timeout_s))
        if not isinstance(reply, dict):
            raise GraderLost("the grader does not speak the protocol")
        return reply

    def _guard(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Overdue as error:
            raise GraderLost("nothing heard in time", overdue=True) from error
        except NoMessage as error:
            raise GraderLost(f"the grader sent {error}") from error
        except ChannelClosed as error:
            raise GraderLost(
                f"the grader process was lost: {self._isolated.exit_reason()}"
            ) from error


def _no_start(reason: str) -> UserError:
    return UserError(
        f"a grader process does not start: {reason}",
        place="reward",
        remedy="`python -m sampler rewards` lists the plug-ins; docs/sandbox.md says what a "
        "process in the sandbox can reach",
    )


def _packages(points: Iterable[EntryPoint]) -> tuple[dict[str, str], list[Path]]:
    """Return import name -> file of our packages and of the terms', and the paths to read."""
    files: dict[str, str] = {}
    readable = []
    names = ["runspec", "sampler", "verify"]
    for point in points:
        point.load()
        names.append(point.module.partition(".")[0])
    for name in names:
        found = sys.modules[name].__file__
        if found is None:  # a namespace package, importable from site-packages
            continue
        file = Path(found).resolve()
        files[name] = str(file)
        readable.append(file.parent if file.name == "__init__.py" else file)
    return files, readable
