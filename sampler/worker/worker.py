"""A sampling worker: lease -> policy version -> rollouts -> rewards and proofs -> submission.

The worker makes no choices and stores no progress. After a kill at any time, it asks again, gets
its open leases back and samples the same rollouts. Leases, weights, grading, proofs and submissions
are handled in threads beside the sampling. `next_action` decides the next action, and this loop
performs it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.schema import RunSpec, SamplerPool
from runspec.core.signed import SigningKey
from sampler.engine.engine import Engine, EngineDied, same_death_is_final
from sampler.engine.requests import GenerationAborted, NoVersion, Sampled
from sampler.worker import rollouts
from sampler.worker.rollouts import Ask, Load, Submit, Wait
from sampler.worker.stores import Background, Event, HeldLease, Made, Meter, Outbox, Versions
from verify.client import CoordinatorClient, RunFinished, SubmissionRefused
from verify.formats.lease import lease_digest, open_lease
from verify.formats.submission import Rollout, encode_rollouts, sign_submission
from verify.plugins import TaskSet
from verify.toploc import build_proofs_of

LEASE_POLL_S = 30.0
"""Seconds that a request for a lease stays open; the coordinator answers once there is work."""
LAST_SUBMISSIONS_S = 5.0
"""Seconds for the last submissions of a finished run."""
FINISH_S = 1.2
"""Seconds after a stop for leases that are nearly finished to be submitted."""
RELEASE_S = 0.5
"""Seconds for giving the other leases back."""
DEATH_S = 10.0
"""Seconds in which a dead engine must fail all its requests."""
_LOOK_S = 0.05
"""Seconds between two checks of the engine and of `stop`."""


class Worker:
    """Samples lease after lease until the run is finished or `stop` is set.

    Args:
        client: of the coordinator, with the identity of `key`.
        key: signs the submissions.
        spec: of the run.
        pool: settings of sampling.
        versions: source of policy versions.
        engine: samples.
        tasks: problems, prompts and grading.
        outbox: stores submissions that are not accepted yet when the worker ends.
        meter: totals of the work, which the heartbeats report.
        log: the role's.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        key: SigningKey,
        spec: RunSpec,
        pool: SamplerPool,
        *,
        versions: Versions,
        engine: Engine,
        tasks: TaskSet,
        outbox: Outbox,
        meter: Meter,
        log: logging.Logger,
    ) -> None:
        self._client, self._key, self._spec, self._pool = client, key, spec, pool
        self._versions, self._engine, self._tasks = versions, engine, tasks
        self._outbox, self._meter, self._log = outbox, meter, log
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._held: dict[str, HeldLease] = {}
        self._submitting: set[str] = set()  # leases
        self._asking = self._leaving = self._finished = False
        self._loaded = (-1, Path())
        self._death: EngineDied | None = None  # the last one under a lease
        self._asker = Background("ask", self._events.put)
        self._submitter = Background("submit", self._events.put)

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set or the run is finished.

        Raises:
            UserError: the coordinator or the weights are unavailable, a load failed its checks, or
                the engine died twice under one lease.
            RunStopped: the engine died twice for the same reason.
        """
        try:
            # What an earlier process stored is sent beside the first leases.
            for lease, made in self._outbox.load().items():
                self._log.info("sending the stored submission of lease %s", lease[:16])
                self._client.hold(lease)
                self._submit(lease, partial(self._hand_in, lease, made))
            while not stop.is_set():
                self._act()
            self._leave()
        except UserError:  # finished submissions are stored for the next start
            self._outbox.keep()
            raise
        except RunFinished:
            self._hand_in_the_last()
            self._log.info("the run is finished")

    def load(self, version: int, path: Path) -> None:
        """Switch the engine to a version and check the load."""
        try:
            report = self._engine.load(path, version)
        except EngineDied as error:
            self._log.warning("the engine died in a load, starting it again: %s", error)
            with same_death_is_final(error):
                report = self._engine.load(path, version)
        self._loaded = (version, path)
        self._meter.loaded(version, report.pause_s)
        self._log.info(
            "version %d loaded in %.2f s, sampling paused for %.2f s: %d tensors compared, "
            "%d repacked ones probed",
            *(version, report.load_s, report.pause_s),
            *(len(report.compared), len(report.repacked)),
        )
        waiting = [h.lease.version for h in self._held.values() if h.stage == "waiting"]
        self._versions.keep(version, *waiting)

    def finish(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return the rollouts to sign, unchanged. Dishonest workers of the tests override this."""
        return rollouts

    def _act(self) -> None:
        """Handle all events that have arrived, then perform one action or wait for the next
        event."""
        while not self._events.empty():
            self._events.get()()
        now = rollouts.Situation(
            leases=list(self._held.values()),
            loaded=self._engine.version,
            running=self._engine.running,
            capacity=self._engine.capacity,
            asking=self._asking,
            in_flight=self._pool.in_flight_updates,
            newest=self._versions.newest,
        )
        match rollouts.next_action(now):
            case Ask():
                self._asking = True
                self._asker.add(self._next_lease)
            case Load(version):
                leases = [h.lease for h in self._held.values() if h.lease.version == version]
                digest = leases[0].manifest_digest if leases else None
                self.load(version, self._versions.get(version, digest))
            case Submit(digest):
                held = self._held[digest]
                held.stage, held.since = "sampling", time.monotonic()
                self._meter.lease_began()
                self._submit_requests(held)
            case Wait():
                with suppress(queue.Empty):
                    self._events.get(timeout=_LOOK_S)()

    def _granted(self, held: HeldLease | None, error: BaseException | None = None) -> None:
        """Take in the answer to a request for a lease: None if there is none now."""
        self._asking = False
        if error is not None and not self._finished:
            raise error
        if held is not None:
            # A lease may be granted again while its first grant is on its way.
            self._held.setdefault(held.digest, held)

    def _settled(self, lease: str, error: BaseException | None) -> None:
        """Forget a lease that was submitted or refused, or whose submission failed."""
        self._held.pop(lease, None)
        self._submitting.discard(lease)
        if error is not None:
            raise error

    def _next_lease(self) -> Event:
        """Ask for a lease and fetch its version."""
        try:
            data = self._client.lease(LEASE_POLL_S)
            if data is None:
                return partial(self._granted, None)
            lease = open_lease(data, coordinators=self._client.roles().coordinator)
            if lease.pool != self._pool.name or lease.groups > self._pool.groups_per_submission:
                raise UserError(
                    f"a lease of {lease.groups} groups for pool {lease.pool!r}",
                    place="coordinator",
                    remedy=f"this worker serves {self._pool.name!r}: check --pool and --key",
                )
            self._versions.get(lease.version, lease.manifest_digest)
            size = self._spec.grpo.group_size
            plan = rollouts.plan_rollouts(lease, self._tasks, self._pool, group_size=size)
            held = HeldLease(lease_digest(data), lease.version, "waiting", lease=lease, plan=plan)
            return partial(self._granted, held)
        except BaseException as error:  # noqa: BLE001 - raised again by the loop
            return partial(self._granted, None, error)

    def _submit_requests(self, held: HeldLease) -> None:
        try:
            held.future = self._engine.submit([planned.request for planned in held.plan])
        except NoVersion as error:
            if error.death is None:
                raise
            # It died after the last check, which counts as a death under this lease.
            held.future = Future()
            held.future.set_exception(error.death)

        def tell(future: Future[list[Sampled]]) -> None:
            self._events.put(partial(self._sampled, held, future))

        held.future.add_done_callback(tell)

    def _sampled(self, held: HeldLease, future: Future[list[Sampled]]) -> None:
        if held.future is not future or self._finished:  # it is sampled again, or too late
            return
        try:
            sampled = future.result()
        except EngineDied as error:
            if self._leaving:
                held.stage = "waiting"  # it is given back: a new engine would start too late
            else:
                self._revive(error)
            return
        except GenerationAborted:  # only `_leave` aborts
            return
        tokens = sum(len(s.output_tokens) for s in sampled)
        self._meter.lease_ended(tokens)
        seconds, lease = time.monotonic() - held.since, held.lease
        self._log.info(
            "step %d lease %d: %d rollouts of version %d, %d tokens in %.1f s",
            *(lease.step, lease.index, len(sampled), lease.version, tokens, seconds),
        )
        held.stage = "finishing"
        self._submit(held.digest, partial(self._finish, held, sampled))

    def _revive(self, error: EngineDied) -> None:
        """Start the engine again after a death, with the same leases and so the same tokens."""
        ends = time.monotonic() + DEATH_S
        while self._engine.version is None and self._engine.running and time.monotonic() < ends:
            time.sleep(_LOOK_S)  # it fails one lease after the other
        dead = [  # those that it was sampling
            held
            for held in self._held.values()
            if held.stage == "sampling" and (future := held.future) is not None
            if future.done() and isinstance(future.exception(), EngineDied)
        ]
        for held in dead:
            held.deaths += 1
            if held.deaths > 1:
                lease = held.lease
                self._log.error("the second death under step %d lease %d", lease.step, lease.index)
                with same_death_is_final(self._death):
                    raise error
        self._death = error
        self._log.warning(
            "the engine died, sampling %d leases again with a new one: %s", len(dead), error
        )
        if self._engine.version is None:
            self.load(*self._loaded)
        for held in dead:
            self._submit_requests(held)

    def _leave(self) -> None:
        """Submit what is finished within the grace, store submissions that are not accepted by
        then, and give the other leases back."""
        self._leaving, ends = True, time.monotonic() + FINISH_S
        if self._asking:
            threading.Thread(target=self._stop_asking, name="leave", daemon=True).start()
        try:
            while self._asking or any(held.stage != "waiting" for held in self._held.values()):
                if (left := ends - time.monotonic()) <= 0:
                    break
                with suppress(queue.Empty):
                    self._events.get(timeout=left)()
        except UserError as error:
            self._log.warning("while stopping: %s", error)
        with suppress(EngineDied):
            self._engine.abort()
        kept = self._outbox.keep()

        def release() -> None:
            try:
                count = self._client.release(but=kept)
            except (UserError, RunFinished) as error:
                self._log.warning("cannot give the leases back, they will expire: %s", error)
            else:
                self._log.info(
                    "stopped; %d leases were given back, %d submissions are kept for the next "
                    "start",
                    *(count, len(kept)),
                )

        releasing = threading.Thread(target=release, name="release", daemon=True)
        releasing.start()
        releasing.join(RELEASE_S)

    def _stop_asking(self) -> None:
        """Have the coordinator answer the request for a lease that waits there."""
        try:
            self._client.stop_waiting()
        except (UserError, RunFinished) as error:
            self._log.warning("cannot take the request for a lease back: %s", error)

    def _submit(self, lease: str, finish: Callable[[], None]) -> None:
        """Finish a lease in the background, while the next leases are sampled.

        Args:
            lease: its digest.
            finish: builds the submission and submits it.
        """

        def settle() -> Event:
            try:
                finish()
            except SubmissionRefused as error:
                self._log.warning("submission refused, going on: %s", error)
            except BaseException as error:  # noqa: BLE001 - raised again by the loop
                return partial(self._settled, lease, error)
            return partial(self._settled, lease, None)

        self._submitting.add(lease)
        self._submitter.add(settle)

    def _hand_in_the_last(self) -> None:
        """Submit what was sampled before the run finished; the coordinator may refuse it."""
        self._finished, ends = True, time.monotonic() + LAST_SUBMISSIONS_S
        while self._submitting and (left := ends - time.monotonic()) > 0:
            with suppress(queue.Empty, RunFinished):  # the answer to late submissions
                self._events.get(timeout=left)()
        if self._submitting:
            self._log.warning("giving a submission up after %.0f s", LAST_SUBMISSIONS_S)

    def _finish(self, held: HeldLease, sampled: list[Sampled]) -> None:
        lease, digest = held.lease, held.digest
        claims = rollouts.claim_rewards(held.plan, sampled, self._tasks)
        proofs = build_proofs_of([result.selection for result in sampled])
        rows = zip(held.plan, sampled, claims, proofs, strict=True)
        made_rows = rollouts.make_rollouts(lease, digest, rows, self._tasks, self._pool)
        table = encode_rollouts(self.finish(made_rows))
        envelope = sign_submission(
            table, run=lease.run, step=lease.step, index=lease.index, lease=digest, key=self._key
        )
        made = Made(envelope, table)
        self._outbox.put(digest, made)
        self._hand_in(digest, made)

    def _hand_in(self, lease: str, made: Made) -> None:
        try:
            self._client.submit(made.envelope, made.table)
        except (SubmissionRefused, RunFinished):
            self._meter.submitted(accepted=False)
            self._outbox.settle(lease)
            raise
        self._meter.submitted(accepted=True)
        self._outbox.settle(lease)
