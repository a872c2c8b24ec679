"""A sampling worker: lease -> policy version -> rollouts -> rewards and proofs -> submission.

The worker chooses nothing and keeps nothing: killed at any time, it asks again, gets its open
lease back and samples the same rollouts. Grading, proving and handing in run behind the sampling.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runspec.common.errors import UserError
from runspec.common.keys import SigningKey
from runspec.spec.schema import RunSpec, SamplerPool
from sampler.engine.engine import Engine
from sampler.engine.proofs import prove
from sampler.engine.requests import GenerationAborted, Sampled
from sampler.worker.meter import Meter
from sampler.worker.rollouts import PlannedRollout, claim_rewards, make_rollouts, plan_rollouts
from sampler.worker.submitter import Submitter
from sampler.worker.versions import Versions
from verify.client import CoordinatorClient, RunFinished
from verify.formats.lease import Lease, lease_digest, open_lease
from verify.formats.submission import Rollout, encode_rollouts, sign_submission
from verify.plugins import TaskSet, load_task_set

LEASE_POLL_S = 1.0
"""How long one question for a lease stays open; SIGTERM is looked at in between."""
HEARTBEAT_S = 2.0
LAST_SUBMISSIONS_S = 5.0
"""How long a finished run's last submissions may take to be made and handed in."""


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is told on its command line."""

    run: str
    coordinator: str
    weights: list[str]
    public_key: str
    key: Path
    dir: Path
    pool: str


class Worker:
    """Samples lease after lease until the run is finished or `stop` is set.

    Args:
        client: the coordinator's, in the name of `key`.
        key: signs the submissions.
        versions: where policy versions come from.
        engine: samples.
        tasks: problems, prompts and grading.
        spec, pool: what to sample, and how.
        meter: told of the work; the heartbeats read it.
        log: told of each lease.
    """

    def __init__(
        self,
        *,
        client: CoordinatorClient,
        key: SigningKey,
        versions: Versions,
        engine: Engine,
        tasks: TaskSet,
        spec: RunSpec,
        pool: SamplerPool,
        meter: Meter,
        log: logging.Logger,
    ) -> None:
        self._client, self._key, self._versions = client, key, versions
        self._engine, self._tasks, self._spec, self._pool = engine, tasks, spec, pool
        self._meter, self._log = meter, log
        self._submitter = Submitter(log)

    def run(self, stop: threading.Event) -> None:
        """Works until `stop` is set or the run is finished.

        Raises:
            UserError: the coordinator or the weights cannot be had, a load failed its checks.
        """
        try:
            while not stop.is_set():
                self._work(stop)
        except RunFinished:
            # What is sampled already still goes out, unless the coordinator refuses it.
            if not self._submitter.drain(LAST_SUBMISSIONS_S):
                self._log.warning(
                    "a submission is given up: not in after %.0f s", LAST_SUBMISSIONS_S
                )
            with suppress(RunFinished):  # the coordinator's answer to what came too late
                self._submitter.check()
            self._log.info("the run is finished")
        except GenerationAborted:
            self._log.info("stopped while sampling; the lease will be granted again")

    def load(self, version: int, path: Path) -> None:
        """Switches the engine to a version and checks the load."""
        started = time.monotonic()
        report = self._engine.load(path, version)
        self._meter.set_version(version)
        self._log.info(
            "version %d loaded in %.2f s: %d tensors compared, %d repacked ones probed",
            version,
            time.monotonic() - started,
            len(report.compared),
            len(report.repacked),
        )
        self._versions.keep(version)

    def finish(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The last look at a submission before it is signed: an honest worker changes nothing."""
        return rollouts

    def _work(self, stop: threading.Event) -> None:
        data = self._client.lease(LEASE_POLL_S)
        self._submitter.check()
        if data is None:
            return
        digest = lease_digest(data)
        if self._submitter.is_open(digest):  # granted again because its answer is on its way
            self._submitter.wait(digest, LEASE_POLL_S)
            return
        lease = open_lease(data, coordinators=self._client.roles().coordinator)
        if lease.pool != self._pool.name or lease.groups > self._pool.groups_per_submission:
            raise UserError(
                f"a lease of {lease.groups} groups for pool {lease.pool!r}",
                place="coordinator",
                remedy=f"this worker serves {self._pool.name!r}: check --pool and --key",
            )
        if lease.version != self._engine.version:
            path = self._versions.get(lease.version, lease.manifest_digest)
            self.load(lease.version, path)
        self._sample(lease, digest, stop)

    def _sample(self, lease: Lease, digest: str, stop: threading.Event) -> None:
        group_size = self._spec.algorithm.group_size
        plan = plan_rollouts(lease, self._tasks, self._pool, group_size=group_size)
        started = time.monotonic()
        with self._meter.busy():
            sampled = self._engine.generate([p.request for p in plan], stop=stop)
        tokens = sum(len(s.output_tokens) for s in sampled)
        self._meter.add_tokens(tokens)
        seconds = time.monotonic() - started
        self._log.info(
            "step %d lease %d: %d rollouts of version %d, %d tokens, %.0f tokens/s",
            lease.step,
            lease.index,
            len(plan),
            lease.version,
            tokens,
            tokens / seconds,
        )
        self._submitter.add(digest, lambda: self._submit(lease, digest, plan, sampled))

    def _submit(
        self, lease: Lease, digest: str, plan: list[PlannedRollout], sampled: list[Sampled]
    ) -> None:
        rollouts = make_rollouts(
            lease,
            digest,
            plan,
            sampled,
            claim_rewards(plan, sampled, self._tasks),
            prove(sampled),
            tasks=self._tasks,
            pool=self._pool,
        )
        table = encode_rollouts(self.finish(rollouts))
        envelope = sign_submission(
            table, run=lease.run, step=lease.step, index=lease.index, lease=digest, key=self._key
        )
        self._client.submit(envelope, table)


def work(
    options: WorkerOptions,
    log: logging.Logger,
    stop: threading.Event,
    *,
    worker: Callable[..., Worker] = Worker,
    engine: Callable[..., Engine] = Engine,
) -> None:
    """Brings a worker up and lets it work.

    Args:
        options: the command line.
        log: the role's.
        stop: ends the work between two pieces of it.
        worker, engine: what to make them with.

    Raises:
        UserError: something that a person can mend; the message names it.
    """
    key = SigningKey.load(options.key)
    client = CoordinatorClient(
        options.coordinator, key, run=options.run, root_public_key=options.public_key
    )
    spec = client.spec()
    pool = find_pool(spec, options.pool)
    client.register(pool.name, {"engine": pool.engine, "dtype": pool.dtype})
    meter = Meter()
    threading.Thread(
        target=_heartbeats, args=(client, meter, stop, log), name="heartbeat", daemon=True
    ).start()
    versions = Versions(
        options.weights,
        run=options.run,
        root_public_key=options.public_key,
        cache_dir=options.dir / "weights",
        fetch_s=spec.verify.lease_timeout,
        log=log,
    )
    try:
        made = engine(pool)
        version, path = versions.first()
        tasks = load_task_set(spec, path)
        log.info("starting vLLM with version %d, %d problems", version, len(tasks))
        member = worker(
            client=client,
            key=key,
            versions=versions,
            engine=made,
            tasks=tasks,
            spec=spec,
            pool=pool,
            meter=meter,
            log=log,
        )
        member.load(version, path)
        member.run(stop)
    finally:
        versions.close()


def find_pool(spec: RunSpec, name: str) -> SamplerPool:
    """The pool of the spec that a worker serves.

    Raises:
        UserError: there is none of the name, its sampling cannot be checked yet, or it asks for
            what is not built.
    """
    pools = {pool.name: pool for pool in spec.samplers}
    if name not in pools:
        raise UserError(
            f"no sampler pool {name!r}",
            place="--pool",
            remedy=f"the spec has: {', '.join(sorted(pools))}",
        )
    sampling = pools[name].sampling
    if sampling.top_p < 1.0 or sampling.top_k > 0:
        raise UserError(
            "top_p and top_k cut the distribution that validators recompute",
            place=f"samplers.{name}.sampling",
            remedy="set top_p: 1.0 and top_k: -1",
        )
    if pools[name].in_flight_updates:
        raise UserError(
            "a worker cannot take over a version in the middle of a rollout yet",
            place=f"samplers.{name}.in_flight_updates",
            remedy="set it to false",
        )
    return pools[name]


def _heartbeats(
    client: CoordinatorClient, meter: Meter, stop: threading.Event, log: logging.Logger
) -> None:
    while not stop.wait(HEARTBEAT_S):
        try:
            client.heartbeat(meter.state())
        except RunFinished:
            return
        except UserError as error:
            log.warning("heartbeat: %s", error)
