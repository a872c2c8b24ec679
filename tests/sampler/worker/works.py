"""Workers in threads, whose engine does as it is told, and the coordinator they work for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from runspec.core.errors import UserError
from runspec.core.roles import make_invite
from runspec.core.schema import RunSpec
from runspec.core.signed import SigningKey
from sampler.engine.engine import EngineDied
from sampler.engine.requests import GenerationAborted, LoadReport, NoVersion, Sampled, SampleRequest
from sampler.worker.stores import Meter, Outbox
from sampler.worker.worker import Worker
from tests.verify.coordinator.deployment import RUN, Site
from tests.waiting import eventually
from verify.client import CoordinatorClient
from verify.formats.submission import Rollout, decode_rollouts
from verify.plugins import Graded, GradeItem, Problem, TaskSet
from verify.toploc import select, split

LOG = logging.getLogger("worker")
LENGTH = 8
LONG_S = 600.0
"""Longer than anything takes that is to end by itself."""


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

    def die(self, reason: str = "") -> None:
        self.version = None
        for _, future in self._take():
            future.set_exception(EngineDied("the engine core ended (killed)", exit_reason=reason))

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


class Counting(TaskSet):
    """A task set whose problems are numbers."""

    eos_token_id, targets, data_digest = 0, [4, 8], ""

    def __len__(self) -> int:
        return 50

    def problem(self, index: int) -> Problem:
        return Problem(f"count-{index}", "counting", str(index), {})

    def prompt_tokens(self, index: int, target: int | None, seed: int = 0) -> list[int]:
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
        log=LOG,
    )


class Member:
    """A worker in a thread, and what it ended with."""

    def __init__(
        self, folder: Path, spec: RunSpec, key: SigningKey, client: CoordinatorClient
    ) -> None:
        self.engine, self.shelf, self.meter = ObedientEngine(), Shelf(), Meter()
        self.stop, self.client = threading.Event(), client
        self.failure: BaseException | None = None
        pool = next(pool for pool in spec.samplers if pool.name == "near")
        self._worker = Worker(
            client,
            key,
            spec,
            pool,
            versions=self.shelf,  # type: ignore[arg-type]
            engine=self.engine,  # type: ignore[arg-type]
            tasks=Counting(),
            outbox=outbox_in(folder, key),
            meter=self.meter,
            log=LOG,
        )
        self._thread = threading.Thread(target=self._run)

    def start(self, *, loaded: int = 0) -> None:
        """Works; `loaded` is the version that it begins with."""
        self._first = loaded
        self._thread.start()

    @property
    def leaving(self) -> bool:
        return self._worker._leaving

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def leave(self) -> None:
        self.stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._worker.load(self._first, Path(f"v{self._first}"))
            self._worker.run(self.stop)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.failure = error


class Works:
    """A site that serves, and the workers of a test."""

    def __init__(self, site: Site, spec: RunSpec) -> None:
        self.site, self.spec = site, spec
        self.members: list[Member] = []

    def member(self, key: SigningKey | None = None) -> Member:
        key = key or SigningKey.generate()
        folder = self.site.run_dir.parent / "worker"
        member = Member(folder, self.spec, key, self.joined(key))
        self.members.append(member)
        return member

    def busy(self, key: SigningKey | None = None, *, loaded: int = 0) -> Member:
        """A worker with two leases in its engine, which finishes them when it is told to."""
        member = self.member(key)
        member.engine.at_once = False
        member.start(loaded=loaded)
        eventually(lambda: len(member.engine.submitted) == 2, "two leases are in the engine")
        return member

    def joined(self, key: SigningKey) -> CoordinatorClient:
        """A registered key's client; it was invited, for the pool may be a trusted one."""
        client = self.site.client(key, deadline_s=LONG_S)
        invite = make_invite(
            self.spec.name, pool="near", uses=1, valid_s=LONG_S, coordinator=self.site.coordinator
        )
        client.register("near", {}, invite=invite)
        return client

    def submissions(self) -> list[Path]:
        return sorted(self.site.run_dir.glob("rollouts/step_*/*.safetensors"))

    def rows(self) -> list[list[Rollout]]:
        return [
            decode_rollouts(path.read_bytes(), max_rows=9, max_bytes=1 << 20)
            for path in self.submissions()
        ]


@contextmanager
def site_of(folder: Path, spec: RunSpec) -> Iterator[Works]:
    """The site is not served yet."""
    site = Site(folder, spec)
    works = Works(site, spec)
    with site.origin():
        site.publish(0)
        try:
            yield works
        finally:
            for member in works.members:
                member.leave()
