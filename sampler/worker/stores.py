"""What a worker holds: leases, submissions that are not accepted yet, versions, totals of its work.

The coordinator may refuse a submission for a while if too many wait for a verdict. A worker that
is stopped meanwhile writes its submissions to its folder, and sends the same bytes at its next
start if the lease is still valid. A worker that is killed stores nothing and samples again.

    <lease>.submission    a line with the signed envelope, which names the table's digest; the table
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from broadcast.client import WeightsClient
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, remove_leftovers, write_atomic
from runspec.core.http_server import counter, gauge
from runspec.core.roles import Latest
from runspec.core.signed import BadSignature
from sampler.engine.requests import Sampled
from sampler.worker.rollouts import OpenLease, PlannedRollout
from verify.formats.lease import Lease
from verify.formats.submission import MAX_ENVELOPE_BYTES, open_submission
from verify.plugins import WeightsLocation


@dataclass
class HeldLease(OpenLease):
    """A lease and the state of its sampling; only the loop's thread changes it."""

    lease: Lease
    plan: Sequence[PlannedRollout]
    future: Future[list[Sampled]] | None = None
    """Result of its sampling; a new one if it is sampled again."""
    deaths: int = 0
    """Engines that died while they sampled it."""
    since: float = field(default_factory=time.monotonic)
    """When its sampling began."""


Event = Callable[[], None]
"""Something that happened, for the loop to handle: it may raise the error of its thread."""


class Background:
    """A thread that runs work in order and reports what each piece returns. Ends with the process.

    Args:
        name: of the thread.
        report: receives the events, on that thread.
    """

    def __init__(self, name: str, report: Callable[[Event], None]) -> None:
        self._report = report
        self._queue: queue.SimpleQueue[Callable[[], Event]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, work: Callable[[], Event]) -> None:
        """Queue a piece of work, which limits its own time and raises nothing."""
        self._queue.put(work)

    def _run(self) -> None:
        while True:
            self._report(self._queue.get()())


_SUFFIX = ".submission"


@dataclass(frozen=True)
class Made:
    """A submission that is ready to send."""

    envelope: bytes
    table: bytes


class Outbox:
    """Submissions to send, by the digest of their lease. Thread-safe.

    Args:
        folder: stores the submissions of a worker that stops.
        run: the run's name.
        worker: the worker's public key.
        max_bytes: limit of a submission's table.
        log: receives warnings about lost or damaged submissions.
    """

    def __init__(
        self, folder: Path, *, run: str, worker: str, max_bytes: int, log: logging.Logger
    ) -> None:
        self._folder, self._run, self._worker = folder, run, worker
        self._max_bytes, self._log = max_bytes, log
        self._lock = threading.Lock()
        self._made: dict[str, Made] = {}

    def put(self, lease: str, made: Made) -> None:
        """Add a submission that is about to be sent."""
        with self._lock:
            self._made[lease] = made

    def settle(self, lease: str) -> None:
        """Remove a submission that was accepted or refused."""
        with self._lock:
            self._made.pop(lease, None)
            with suppress(OSError):  # at worst it is sent and refused once more
                (self._folder / f"{lease}{_SUFFIX}").unlink(missing_ok=True)

    def keep(self) -> list[str]:
        """Write the remaining submissions to disk, to be sent at the next start.

        Returns:
            The leases whose submissions are on the disk now.
        """
        kept = []
        with self._lock:
            for lease, made in self._made.items():
                path, data = self._folder / f"{lease}{_SUFFIX}", made.envelope + b"\n" + made.table
                try:
                    write_atomic(path, data)
                    kept.append(lease)
                except UserError as error:
                    self._log.warning(
                        "a submission is lost, its lease can be sampled again: %s", error
                    )
        return kept

    def load(self) -> dict[str, Made]:
        """Return the submissions that an earlier process stored, by lease; remove damaged ones."""
        remove_leftovers(self._folder)
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            try:
                data = read_bounded(path, MAX_ENVELOPE_BYTES + self._max_bytes)
                envelope, _, table = data.partition(b"\n")
                said = open_submission(envelope)
                if (said.run, said.worker, said.lease) != (self._run, self._worker, path.stem):
                    raise BadSignature("submission: of another run, worker or lease")
                if len(table) > self._max_bytes or digest_bytes(table) != said.digest:
                    raise BadSignature("submission: the table is not the one that was signed")
                self.put(path.stem, Made(envelope, table))
            except (OSError, UserError, BadSignature) as error:
                self._log.warning("%s is no submission to send: %s", path, error)
                self.settle(path.stem)
        with self._lock:
            return dict(self._made)


_POLL_S = 20.0
"""Seconds that one request for a newer version stays open."""
_RETRY_S = 1.0
_JOIN_S = 0.05
DIRECTORY_EVERY_S = 120.0


class VersionWatch(ABC):
    """Waits in a thread for announcements of newer versions, and has a client to fetch them with.

    Args:
        source: names relays or origins, and the folder that stores versions in `v<N>`.
        fetch_s: seconds after which a fetch is given up.
        log: receives errors of the watch.
    """

    def __init__(self, source: WeightsLocation, fetch_s: float, log: logging.Logger) -> None:
        self._news, self._client = (  # two, so a long poll delays no fetch
            WeightsClient(
                source.urls,
                run=source.run,
                root_public_key=source.root_public_key,
                cache_dir=source.cache_dir,
            )
            for _ in range(2)
        )
        self._fetch_s, self._log = fetch_s, log
        self.newest = -1
        """The newest version that was taken in; -1 if there is none."""
        self._stop = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="versions", daemon=True)

    @abstractmethod
    def _take_in(self, latest: Latest) -> None:
        """Take in a version newer than `newest`.

        Raises:
            UserError: it cannot be had now; it is asked for again.
        """

    def close(self) -> None:
        """End the watch and close the connections."""
        with self._ending:
            self._stop.set()
        while self._thread.is_alive():  # it may send another request before it checks `_stop`
            for client in (self._news, self._client):
                client.cancel()
            self._thread.join(_JOIN_S)
        for client in (self._news, self._client):
            client.close()

    def follow(self, directory: Callable[[], Collection[str]], *, public_only: bool) -> None:
        """Fetch chunks from relays of volunteers too, which a thread asks for now and then.

        Args:
            directory: returns their URLs, or raises UserError.
            public_only: connect to public addresses only.
        """

        def work() -> None:
            while not self._stop.is_set():
                try:
                    urls = directory()
                    with self._ending:
                        if not self._stop.is_set():
                            self._client.set_volunteers(urls, public_only=public_only)
                except UserError as error:
                    self._log.warning("relays of volunteers: %s", error)
                self._stop.wait(DIRECTORY_EVERY_S)

        threading.Thread(target=work, name="volunteers", daemon=True).start()

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                latest = self._news.latest(None if self.newest < 0 else self.newest, _POLL_S)
                if latest is not None:
                    self._take_in(latest)
            except CancelledError:  # `close`
                return
            except UserError as error:
                self._log.warning("newer versions: %s", error)
                self._stop.wait(_RETRY_S)


FIRST_S = 600.0
"""Seconds until the first version must appear; a learner may have to compile and save it."""


class Versions(VersionWatch):
    """Fetches versions, and holds only those passed to `keep` and the newest."""

    def __init__(self, source: WeightsLocation, fetch_s: float, log: logging.Logger) -> None:
        super().__init__(source, fetch_s, log)
        self._fetching = threading.Lock()
        self._here: dict[tuple[int, str], Path] = {}

    def first(self) -> tuple[int, Path]:
        """Wait for the newest version, fetch it, and start to prefetch later ones.

        Raises:
            UserError: none appeared by the deadline; the message names the relays.
        """
        latest = self._news.latest(None, FIRST_S)
        if latest is None:
            raise UserError(
                f"no version published within {FIRST_S:.0f} s",
                place="weights",
                remedy="check the learner and the publisher",
            )
        path = self.get(latest.version, latest.manifest_digest)
        self._thread.start()
        return latest.version, path

    def get(self, version: int, manifest_digest: str | None) -> Path:
        """Return the directory of a version, at once if it is on this machine.

        Args:
            version: its number.
            manifest_digest: from a lease; None for a version that the publisher announced.

        Raises:
            UserError: it did not arrive in time, or its digest differs.
        """
        for (number, digest), here in list(self._here.items()):
            if number == version and manifest_digest in (digest, None):
                return here  # even if another version is being fetched
        with self._fetching:
            path = self._client.fetch(
                version, manifest_digest=manifest_digest, deadline_s=self._fetch_s
            )
            self._here[version, manifest_digest or ""] = path
            self.newest = max(version, self.newest)
            return path

    def keep(self, *versions: int) -> None:
        """Give up every version except these and the newest.

        If a fetch is under way, the next call removes them: a removal would delete the parts of the
        fetch, and waiting for it may take as long as a step.
        """
        if self._fetching.acquire(blocking=False):
            try:
                kept = {*versions, self.newest}
                for key in [key for key in self._here if key[0] not in kept]:
                    del self._here[key]
                self._client.prune(kept)
            finally:
                self._fetching.release()

    def _take_in(self, latest: Latest) -> None:
        self.get(latest.version, latest.manifest_digest)


class Meter(Collector):
    """Sampling time, tokens and loads since the process began. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._leases = 0
        self._busy_since = 0.0
        self._totals: dict[str, int | float] = {"version": -1, "busy_s": 0.0, "pause_s": 0.0}
        self._totals |= {"tokens": 0, "loads": 0}
        self._answers: Counter[str] = Counter({"accepted": 0, "refused": 0})

    def lease_began(self) -> None:
        """Note that the sampling of a lease began. Time counts as busy while at least one lease is
        sampled."""
        with self._lock:
            if self._leases == 0:
                self._busy_since = time.monotonic()
            self._leases += 1

    def lease_ended(self, tokens: int = 0) -> None:
        """Note that a lease was sampled or given up.

        Args:
            tokens: its output tokens.
        """
        with self._lock:
            self._leases -= 1
            self._totals["tokens"] += tokens
            if self._leases == 0:
                self._totals["busy_s"] += time.monotonic() - self._busy_since

    def loaded(self, version: int, pause_s: float) -> None:
        """Note that a version was loaded.

        Args:
            version: its number.
            pause_s: seconds in which nothing could be sampled for it.
        """
        with self._lock:
            self._totals["version"] = version
            self._totals["loads"] += 1
            self._totals["pause_s"] += pause_s

    def submitted(self, *, accepted: bool) -> None:
        """Count a submission that the coordinator took or refused."""
        with self._lock:
            self._answers["accepted" if accepted else "refused"] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the figures for Prometheus."""
        state = self.state()
        with self._lock:
            leases, answers = self._leases, dict(self._answers)
        version = None if state["version"] < 0 else state["version"]
        yield gauge("worker_version", "Version that it samples with.", version)
        yield gauge("worker_leases", "Leases that are being sampled.", leases)
        yield counter("worker_tokens", "Output tokens of sampled leases.", state["tokens"])
        yield counter("worker_busy_seconds", "Seconds with a lease to sample.", state["busy_s"])
        yield counter("worker_loads", "Versions loaded.", state["loads"])
        text = "Seconds in which loads kept it from sampling."
        yield counter("worker_pause_seconds", text, state["pause_s"])
        text = "Submissions, by the coordinator's answer, before any verdict."
        yield counter("worker_submissions", text, answers, "answer")

    def state(self) -> dict[str, int | float]:
        """Return the heartbeat: `version` (-1 before the first), `busy_s`, `tokens`, `loads` with
        the sum of their `pause_s`, and `uptime_s`."""
        with self._lock:
            now = time.monotonic()
            running = now - self._busy_since if self._leases else 0.0
            sums = {"busy_s": self._totals["busy_s"] + running, "uptime_s": now - self._started}
            return self._totals | sums
