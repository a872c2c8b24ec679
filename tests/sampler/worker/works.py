"""Workers in threads, whose engine does as it is told, and the real coordinator they work for."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runspec.core.invite import make_invite
from runspec.core.keys import SigningKey
from runspec.core.spec.schema import RunSpec
from sampler.worker.meter import Meter
from sampler.worker.worker import Registration, Worker
from tests.sampler.worker.obedient import Counting, ObedientEngine, Shelf, outbox_in
from tests.verify.coordinator.deployment import RUN, Site, tiny_spec
from tests.waiting import eventually
from verify.client import CoordinatorClient
from verify.formats.submission import Rollout, decode_rollouts

LOG = logging.getLogger("test-worker")
DEADLINE_S = 20.0


class Member:
    """A worker in a thread, and what it ended with."""

    def __init__(
        self, site: Site, spec: RunSpec, key: SigningKey, client: CoordinatorClient
    ) -> None:
        self.engine, self.shelf, self.stop, self.meter = (
            ObedientEngine(),
            Shelf(),
            threading.Event(),
            Meter(),
        )
        self.failure: BaseException | None = None
        pool = next(pool for pool in spec.samplers if pool.name == "near")
        self._worker = Worker(
            Registration(client, key, spec, pool, self.meter, LOG),
            versions=self.shelf,  # type: ignore[arg-type]
            engine=self.engine,  # type: ignore[arg-type]
            tasks=Counting(),
            outbox=outbox_in(site.run_dir.parent / "worker", key),
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
        self._thread.join(DEADLINE_S)
        assert self.ended()

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

    def member(self, key: SigningKey | None = None, *, deadline_s: float = DEADLINE_S) -> Member:
        key = key or SigningKey.generate()
        member = Member(self.site, self.spec, key, self.joined(key, deadline_s=deadline_s))
        self.members.append(member)
        return member

    def busy(
        self, key: SigningKey | None = None, *, deadline_s: float = DEADLINE_S, loaded: int = 0
    ) -> Member:
        """A worker with two leases in its engine, which finishes them when it is told to."""
        member = self.member(key, deadline_s=deadline_s)
        member.engine.at_once = False
        member.start(loaded=loaded)
        eventually(lambda: len(member.engine.submitted) == 2, "two leases are in the engine")
        return member

    def joined(self, key: SigningKey, *, deadline_s: float = DEADLINE_S) -> CoordinatorClient:
        """A registered key's client; it was invited, for the pool may be a trusted one."""
        client = self.site.client(key, deadline_s=deadline_s)
        invite = make_invite(
            self.spec.name, pool="near", uses=1, valid_s=60.0, coordinator=self.site.coordinator
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


def spec_with(**pool: object) -> RunSpec:
    spec = tiny_spec()
    pools = [each.model_copy(update=pool) for each in spec.samplers]
    return spec.model_copy(update={"samplers": pools})


@contextmanager
def site_of(folder: Path, spec: RunSpec) -> Iterator[Works]:
    site = Site(folder, spec)
    works = Works(site, spec)
    with site.origin():
        site.publish(0)
        try:
            yield works
        finally:
            for member in works.members:
                member.leave()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def working(site: Site, key_file: Path) -> Iterator[subprocess.Popen[str]]:
    """A worker's process that has begun to work, with an engine that answers at once."""
    command = [
        *(sys.executable, "-m", "tests.sampler.worker.obedient", site.url, RUN),
        *(site.root.public_hex, str(key_file), "near", site.invite),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "working\n"
            yield process
        finally:
            process.kill()
