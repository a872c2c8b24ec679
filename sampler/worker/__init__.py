"""Sampling worker: lease -> version -> rollouts -> rewards and proofs -> submission.

Here are its start and end: key, spec, registration, weights, tasks, engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

from runspec.core.errors import UserError
from runspec.core.http_server import serve_metrics
from runspec.core.models import device_of
from runspec.core.process import Role, not_retried
from runspec.core.schema import SamplerPool
from sampler.engine.arguments import find_pool
from sampler.engine.engine import Engine
from sampler.worker.stores import Meter, Outbox, Versions
from sampler.worker.worker import Worker
from verify import HEARTBEAT_S
from verify.client import CoordinatorClient, RunFinished, connect, problem_files
from verify.formats.submission import max_submission_bytes
from verify.plugins import WeightsLocation, load_task_set, require_graders

_LOOK_S = 2.0
"""Least seconds between two heartbeats, because small models may load versions very often."""


def work(
    role: Role,
    log: logging.Logger,
    stop: threading.Event,
    *,
    worker: Callable[..., Worker] = Worker,
    engine: Callable[..., Engine] = Engine,
) -> None:
    """Start a worker and let it work.

    Args:
        role: one of the run's workers, or a volunteer's.
        log: the role's.
        stop: ends the work at the next opportunity.
        worker, engine: constructors.

    Raises:
        UserError: an error that a person can fix; the message names it.
        RunStopped: an error that would occur again: no such pool, unreadable problems.
    """
    client, key = connect(role)
    spec = client.spec()
    with not_retried():
        pool = find_pool(spec, role.pool)
    own = find_pool(role.spec, role.pool)  # what this machine has, and how it divides the model
    pool = pool.model_copy(update={"hardware": own.hardware, "parallel": own.parallel})
    require_graders(spec)
    with ExitStack() as up:  # closes in reverse order
        with not_retried():  # before any thread starts: on CPUs it may fork this process
            made = up.enter_context(closing(engine(pool)))
        client.register(pool.name, about(pool))
        meter = Meter()
        serve_metrics(role.figures, meter, log)
        threading.Thread(
            target=_heartbeats, args=(client, meter, stop, log), name="heartbeat", daemon=True
        ).start()
        versions = Versions(WeightsLocation.of(role), spec.verify.lease_timeout, log)
        up.enter_context(closing(versions))
        if (volunteers := spec.broadcast.volunteers) != "none":
            public_only = volunteers == "public"
            versions.follow(lambda: client.site().relays, public_only=public_only)
        version, path = versions.first()
        data = problem_files(client, spec, WeightsLocation.of(role), log)
        tasks = up.enter_context(closing(load_task_set(spec, path, data)))
        log.info("loading vLLM with version %d, %d problems", version, len(tasks))
        outbox = Outbox(
            role.work / "outbox" / key.public_hex[:16],
            run=spec.name,
            worker=key.public_hex,
            max_bytes=max_submission_bytes(spec, pool),
            log=log,
        )
        parts = {"versions": versions, "engine": made, "tasks": tasks, "outbox": outbox}
        member = worker(client, key, spec, pool, **parts, meter=meter, log=log)
        member.load(version, path)
        member.run(stop)


def about(pool: SamplerPool) -> dict[str, str | float]:
    """Return what a worker says of itself when it registers."""
    device = device_of(pool.hardware)
    known = {} if device.memory is None else {"memory": device.memory}
    ranks = {"tensor": pool.parallel.tensor, "copies": pool.parallel.data}
    return {"engine": pool.engine, "dtype": pool.dtype, "device": device.kind, **known, **ranks}


def _heartbeats(
    client: CoordinatorClient, meter: Meter, stop: threading.Event, log: logging.Logger
) -> None:
    """Send a heartbeat at once, when the coordinator wants the next, and soon after a load."""
    due, loads = time.monotonic(), -1
    while True:
        state = meter.state()
        if time.monotonic() >= due or state["loads"] != loads:
            loads, every_s = int(state["loads"]), HEARTBEAT_S
            try:
                every_s = client.heartbeat(state)
            except RunFinished:
                return
            except UserError as error:
                log.warning("heartbeat: %s", error)
            due = time.monotonic() + every_s
        if stop.wait(_LOOK_S):
            return
