"""A run of real islands that are started again when they end, and what may happen to them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType

from runspec.core.process import EXIT_FINAL
from runspec.core.run_files import STATE_FILE
from runspec.core.schema import RunSpec
from runspec.core.schema.load import dump_resolved
from runspec.core.signed import SigningKey
from tests.learner_jax.islands.island_runs import IslandRun
from verify.coordinator.ledger import Ledger
from verify.coordinator.machine.events import IslandsCommitted
from verify.formats.batch import CommitRecord
from verify.island_client import Committed, IslandClient

DISK_BYTES = 24 << 20
"""Of the small disks."""
AGAIN_S = 1.0
"""Until an island that ended is started again."""
DEADLINE_S = 400.0
"""Of each wait."""
CUT_S = 60.0


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own at a folder; needs root."""
    folder.mkdir(parents=True, exist_ok=True)
    size = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class MindedRun:
    """A run whose islands are started again, as a supervisor does, unless their part is done.

    Args:
        folder: gets the run.
        spec: of the run.
        tokenizer: folder of the run's tokenizer.
        small: whether shares, and folders beside the run directory, lie on small disks.
    """

    def __init__(self, folder: Path, spec: RunSpec, tokenizer: Path, *, small: bool) -> None:
        self.run = IslandRun(folder, spec, tokenizer, self._through)
        self.names, self.steps = self.run.names, spec.steps
        self.records: list[CommitRecord] = []
        self._stack, self._small = ExitStack(), small
        self._ended: dict[str, float] = {}
        self._links: list[subprocess.Popen[str]] = []

    def __enter__(self) -> MindedRun:
        if self._small:
            for name in self.names:
                for folder in self.disks(name):
                    self._stack.enter_context(small_disk(folder))
                (self.run.folder(name) / "spec.json").write_bytes(dump_resolved(self.run.spec))
        self._stack.enter_context(self.run)
        self.processes = {name: self.run.start(name) for name in self.names}
        key = SigningKey.load(self.run.path / "keys" / f"island-{self.names[0]}.key")
        url, root = self.run.coordinator.url, self.run.root.public_hex
        self._client = IslandClient(url, self.run.spec.name, key, root_public_key=root)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            for name in self.names:
                print(f"--- {name}", self.run.log(name).read_text()[-6000:], file=sys.stderr)
        self._stack.close()

    def _through(self, url: str) -> str:
        """A link of its own to a server."""
        words = [sys.executable, "-m", "tests.throttle", "1e9", url.removeprefix("http://")]
        link = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self._stack.callback(link.wait)
        self._stack.callback(link.kill)
        self._links.append(link)
        assert link.stdout is not None
        return link.stdout.readline().strip()

    def links(self, name: str) -> list[subprocess.Popen[str]]:
        """An island's link to the coordinator, and the others' link to its shares."""
        first = 2 * self.names.index(name)
        return self._links[first : first + 2]

    def disks(self, name: str) -> list[Path]:
        """The folders of an island that are small disks."""
        store = self.run.path / "store" / f"shares-{name}"
        return [store] if name == self.names[0] else [store, self.run.folder(name)]

    @property
    def committed(self) -> int:
        """Steps that are committed."""
        while isinstance(answer := self._client.record(len(self.records), 0.0), Committed):
            self.records.append(answer.record)
        return len(self.records)

    def mind(self) -> None:
        """Starts islands again that ended before their part was done."""
        for name, process in self.processes.items():
            code = process.poll()
            assert code != EXIT_FINAL, f"island {name} stopped for good"
            if not code:
                continue
            ended = self._ended.setdefault(name, time.monotonic())
            if time.monotonic() > ended + AGAIN_S:
                del self._ended[name]
                self.processes[name] = self.run.start(name)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Minds the islands until a condition holds."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
            self.mind()
            time.sleep(0.1)

    def pass_time(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > end, "time passes")

    def all_contribute(self, steps: int = 1) -> None:
        """Waits until so many more steps have every island, or the run has no more."""
        first = self.committed

        def whole() -> bool:
            done = self.committed
            found = sum(not record.dropped for record in self.records[first:])
            return found >= steps or done == self.steps

        self.wait(whole, f"{steps} steps of all islands after step {first}")

    def finish(self) -> None:
        """Waits until every island has trained the last step."""
        self.wait(lambda: all(p.poll() == 0 for p in self.processes.values()), "the run's end")

    def commits(self) -> list[IslandsCommitted]:
        """The commits that stand, in order: a step's last record replaces those before."""
        with closing(Ledger(self.run.path / STATE_FILE)) as ledger:
            found = [event for event in ledger.events() if isinstance(event, IslandsCommitted)]
        return [*{event.record.step: event for event in found}.values()]


# -- Faults: each returns once its cause is gone ---------------------------------------------------


def kill(run: MindedRun, name: str, rng: random.Random) -> None:
    """The island dies, and is started again."""
    run.processes[name].kill()
    run.processes[name].wait()


def restart_coordinator(run: MindedRun, name: str, rng: random.Random) -> None:
    """The coordinator ends, and starts a moment later."""
    run.run.coordinator.stop()
    time.sleep(rng.uniform(0.0, 4.0))
    run.run.coordinator.start()


def cut(run: MindedRun, name: str, rng: random.Random) -> None:
    """For a minute nothing comes through the island's links."""
    for link in run.links(name):
        os.kill(link.pid, signal.SIGSTOP)
    run.pass_time(CUT_S)
    for link in run.links(name):
        os.kill(link.pid, signal.SIGCONT)


def slow(run: MindedRun, name: str, rng: random.Random) -> None:
    """The island stands still."""
    process = run.processes[name]
    os.kill(process.pid, signal.SIGSTOP)
    run.pass_time(rng.uniform(1.0, 15.0))
    os.kill(process.pid, signal.SIGCONT)


def fill_disk(run: MindedRun, name: str, rng: random.Random) -> None:
    """There is no byte left on one of the island's disks."""
    filler = rng.choice(run.disks(name)) / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    run.pass_time(rng.uniform(2.0, 10.0))
    filler.unlink()
