"""Processes of a benchmark, and a tree of real origins, relays, links and clients among them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from broadcast.layout import make_keys
from broadcast.store import publish
from runspec.core.signed import SigningKey

RUN = "bench"
START_S = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """What a process and the children it has waited for have used so far, kernel included."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, after_name[11:15])) / _TICKS


class NoAnswer(Exception):
    """A process said nothing more."""


@dataclass(frozen=True)
class Started:
    """A background process and what it says, line by line."""

    process: subprocess.Popen[str]
    log: Path

    def line(self, deadline_s: float = START_S) -> str:
        """The next line of its standard output.

        Raises:
            NoAnswer: it ended, or was ended at the deadline, without one.
        """
        assert self.process.stdout is not None
        alarm = threading.Timer(deadline_s, self.process.kill)
        alarm.start()
        said = self.process.stdout.readline().strip()
        alarm.cancel()
        if not said:
            raise NoAnswer(f"{self.process.args}:\n{self.log.read_text()[-3000:]}")
        return said

    def result(self, deadline_s: float) -> dict[str, Any]:
        return json.loads(self.line(deadline_s))

    def go(self) -> None:
        """Tells a process that waits for a line to begin."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)


class Processes:
    """Starts processes in a folder; all end with the block (or SIGTERM), and the folder goes.

    Args:
        parent: where to make the folder; `/dev/shm` is memory.
    """

    def __init__(self, parent: Path) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        self._stack = ExitStack()
        made = tempfile.TemporaryDirectory(prefix="broadcast-bench-", dir=parent)
        self.folder = Path(self._stack.enter_context(made))
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def start(self, *command: object, environment: dict[str, str] | None = None) -> Started:
        self._count += 1
        log = self.folder / f"{self._count}.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self._stack.callback(_end, process)
        return Started(process, log)

    def links(
        self, bits_per_s: float, *urls: str, round_trip_s: float = 0.0
    ) -> tuple[list[str], Started]:
        """A throttled link of its own to each server."""
        addresses = [url.removeprefix("http://") for url in urls]
        command = ["-m", "tests.throttle", bits_per_s, *addresses, "--round-trip", round_trip_s]
        carrier = self.start(*command)
        return [carrier.line() for _ in urls], carrier


class Tree(Processes):
    """A run that is broadcast: `publish` gives it a version, `client` waits for version 1."""

    def __init__(self, parent: Path) -> None:
        super().__init__(parent)
        self._keys = self.folder / "keys"
        self._root = make_keys(self._keys, run=RUN)
        self._store = self.folder / "store"
        small = self.folder / "small"
        small.mkdir()
        (small / "config.json").write_text("{}")
        self.publish(0, small)

    def publish(
        self, version: int, directory: Path, *, base: int | None = None, whole: bool = True
    ) -> float:
        """Publishes; the time (monotonic) from which on readers can hear of it."""
        publish(
            self._store,
            directory,
            run=RUN,
            version=version,
            key=SigningKey.load(self._keys / "publisher.key"),
            roles=(self._keys / "roles.json").read_bytes(),
            base=base,
            whole=whole,
        )
        return time.monotonic()

    def origin(self) -> tuple[str, Started]:
        server = self.start("-m", "broadcast", "origin", self._store, "--listen", "127.0.0.1:0")
        return _address(server), server

    def relay(self, *upstreams: str) -> tuple[str, Started]:
        store = self.folder / f"relay-{self._count}"
        command = ["-m", "broadcast", "relay", "--run", RUN, "--upstream", *upstreams]
        command += ["--store", str(store), "--listen", "127.0.0.1:0", "--public-key", self._root]
        server = self.start(*command)
        return _address(server), server

    def client(self, *urls: str, deadline_s: float) -> Started:
        """A client that knows version 0 already and waits for the next; see `wire.client`."""
        out = self.folder / f"client-{self._count}"
        client = self.start(
            *("-m", "benchmarks.wire.client", RUN, self._root, out, deadline_s, *urls)
        )
        assert client.line() == "ready"
        return client


def _address(server: Started) -> str:
    """Where a server listens, once it does."""
    form = re.compile(r"listening on (http\S+)")
    deadline = time.monotonic() + START_S
    while (found := form.search(server.log.read_text())) is None:
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise NoAnswer(f"a server did not start:\n{server.log.read_text()[-3000:]}")
        time.sleep(0.01)
    return found[1]


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
