"""An engine that does as it is told, and a worker process with it: `python -m ...obedient ARGS`."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from sampler.engine.engine import EngineDied
from sampler.engine.requests import (
    GenerationAborted,
    LoadReport,
    NoVersion,
    Sampled,
    SampleRequest,
)
from sampler.worker.meter import Meter
from sampler.worker.outbox import Outbox
from sampler.worker.worker import Registration, Worker
from tests.verify.coordinator.deployment import RUN
from verify.client import CoordinatorClient
from verify.plugins import Graded, GradeItem, Problem
from verify.toploc.selection import select, split

LENGTH = 8


class ObedientEngine:
    """Finishes what is submitted when it is told to, with tokens that follow from the noise key."""

    capacity = 100

    def __init__(self) -> None:
        self.version: int | None = None
        self.loads: list[tuple[int, int]] = []
        """Version, and sequences that were running."""
        self.submitted: list[list[SampleRequest]] = []
        self.refuses: UserError | None = None
        self.at_once = True
        self.dies_of_abort = False
        self.deaths_before_submit = 0
        """How often it dies between the worker's look at it and what follows from that."""
        self._open: list[tuple[Sequence[SampleRequest], Future[list[Sampled]]]] = []
        self._lock = threading.Lock()

    @property
    def running(self) -> int:
        with self._lock:
            return sum(len(requests) for requests, _ in self._open)

    def load(self, weights_dir: Path, version: int) -> LoadReport:
        self.loads.append((version, self.running))
        if self.refuses is not None and len(self.loads) > 1:
            raise self.refuses
        self.version = version
        return LoadReport([], [], [], load_s=0.5, pause_s=0.25)

    def submit(self, requests: Sequence[SampleRequest]) -> Future[list[Sampled]]:
        if self.deaths_before_submit:
            self.deaths_before_submit -= 1
            self.die()
        if self.version is None:
            raise NoVersion(EngineDied("the engine core ended (killed)"))
        future: Future[list[Sampled]] = Future()
        with self._lock:
            self.submitted.append(list(requests))
            self._open.append((requests, future))
        if self.at_once:
            self.finish()
        return future

    def finish(self) -> None:
        for requests, future in self._take():
            future.set_result([self._sampled(request) for request in requests])

    def die(self) -> None:
        self.version = None
        for _, future in self._take():
            future.set_exception(EngineDied("the engine core ended (killed)"))

    def abort(self) -> None:
        if self.dies_of_abort:
            self.die()
            raise EngineDied("the engine core ended (killed)")
        for _, future in self._take():
            future.set_exception(GenerationAborted())

    def _take(self) -> list[tuple[Sequence[SampleRequest], Future[list[Sampled]]]]:
        with self._lock:
            taken, self._open = self._open, []
        return taken

    def _sampled(self, request: SampleRequest) -> Sampled:
        assert request.noise_key is not None
        rng = np.random.default_rng([word & 0xFFFFFFFF for word in request.noise_key])
        hidden = rng.integers(0x3C00, 0x4000, (LENGTH, 16)).astype(np.uint16)
        return Sampled(
            rng.integers(1, 100, LENGTH).astype(np.int32),
            -rng.random(LENGTH, dtype=np.float32),
            "length",
            np.full(LENGTH, self.version, np.int32),
            select(split(hidden)),
        )


class Counting:
    """A task set whose problems are numbers."""

    eos_token_id, targets, data_digest = 0, [4, 8], ""

    def __len__(self) -> int:
        return 50

    def problem(self, index: int) -> Problem:
        return Problem(f"count-{index}", "counting", str(index), {})

    def prompt_tokens(self, index: int, target: int | None) -> list[int]:
        return [index, target or 0]

    def grade_all(self, items: Sequence[GradeItem]) -> list[Graded]:
        return [Graded(1.0, 0.0, 1.0) for _ in items]

    def close(self) -> None:
        """Nothing to end."""


class Shelf:
    """Versions that are all here."""

    newest = 0

    def get(self, version: int, manifest_digest: str | None) -> Path:
        return Path(f"v{version}")

    def keep(self, *versions: int) -> None:
        """Keeps everything."""


def outbox_in(folder: Path, key: SigningKey) -> Outbox:
    """What a worker of the tiny run leaves there."""
    return Outbox(
        folder / "outbox" / key.public_hex[:16],
        run=RUN,
        worker=key.public_hex,
        max_bytes=1 << 20,
        log=logging.getLogger("worker"),
    )


def main(url: str, run: str, root: str, key_file: str, pool_name: str, invite: str) -> None:
    """Works until it is killed, or told to end."""
    key = SigningKey.load(Path(key_file))
    client = CoordinatorClient(url, key, run=run, root_public_key=root)
    client.register(pool_name, {}, invite=invite)
    spec = client.spec()
    pool = next(pool for pool in spec.samplers if pool.name == pool_name)
    worker = Worker(
        Registration(client, key, spec, pool, Meter(), logging.getLogger("worker")),
        versions=Shelf(),  # type: ignore[arg-type]
        engine=ObedientEngine(),  # type: ignore[arg-type]
        tasks=Counting(),
        outbox=outbox_in(Path(key_file).parent / "worker", key),
    )
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    worker.load(0, Path("v0"))
    print("working", flush=True)
    worker.run(stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
