"""A worker of a trusted pool, with a real coordinator and a real engine, takes a version over in
the middle of its rollouts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from runspec.core.keys import SigningKey
from runspec.core.spec.schema import RunSpec
from sampler.engine.engine import Engine
from sampler.worker.meter import Meter
from sampler.worker.worker import Registration, Worker
from tests.sampler.engine.models import perturbed_version, save_version
from tests.sampler.worker.obedient import Counting, outbox_in
from tests.sampler.worker.works import Works, site_of, spec_with
from tests.waiting import eventually
from verify.coordinator.events import LeaseGranted, SubmissionReceived
from verify.formats.layout import STATE_FILE
from verify.ledger import Ledger

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_engines")]
DEADLINE_S = 120.0
MAX_MODEL_LEN, MAX_NEW_TOKENS = 240, 200
"""Long enough for a version to arrive in the middle."""


class Published:
    """Two versions in directories; the second is there when it is said to be."""

    def __init__(self, folder: Path) -> None:
        self.newest = 0
        self._paths = [save_version(folder / "v0")]
        self._paths.append(perturbed_version(self._paths[0], folder / "v1", "gate_proj.weight"))

    def get(self, version: int, manifest_digest: str | None) -> Path:
        return self._paths[version]

    def keep(self, *versions: int) -> None:
        """Keeps everything."""


def trusted_spec() -> RunSpec:
    return spec_with(
        in_flight_updates=True,
        trust="trusted",
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_new_tokens=MAX_NEW_TOKENS,
    )


@contextmanager
def at_work(works: Works, versions: Published, engine: Engine) -> Iterator[None]:
    """A worker in a thread, which has begun with version 0; it leaves at the end, without fault."""
    key, stop, failures = SigningKey.generate(), threading.Event(), list[BaseException]()
    client = works.joined(key)
    log = logging.getLogger("test-worker")
    worker = Worker(
        Registration(client, key, works.spec, works.spec.samplers[0], Meter(), log),
        versions=versions,  # type: ignore[arg-type]
        engine=engine,
        tasks=Counting(),
        outbox=outbox_in(works.site.run_dir.parent / "worker", key),
    )
    worker.load(0, versions.get(0, None))

    def run() -> None:
        try:
            worker.run(stop)
        except BaseException as error:  # noqa: BLE001 - looked at below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(DEADLINE_S)
    assert failures == []


def test_a_version_that_arrives_in_the_middle_is_in_the_submission(
    tmp_path: Path,
) -> None:
    # given a worker of a trusted pool, in the middle of two leases of version 0
    spec, versions = trusted_spec(), Published(tmp_path)
    with (
        closing(Engine(spec.samplers[0])) as engine,
        site_of(tmp_path, spec) as works,
        works.site.serving(),
    ):
        with at_work(works, versions, engine):
            [core] = engine.pids
            eventually(lambda: engine.running == 8, "two leases are in the engine")
            # when a version is published
            versions.newest = 1
            eventually(lambda: engine.version == 1, "it is loaded", deadline_s=DEADLINE_S)
            eventually(lambda: len(works.submissions()) >= 2, "work", deadline_s=DEADLINE_S)
            # then the engine has taken it over in its stride
            assert engine.pids == [core]
        rows = [row for rows in works.rows() for row in rows]
        submissions = len(works.submissions())
    # and rollouts of the leases of version 0 hold tokens of both, in order, one for one
    mixed = [row for row in rows if set(row.versions.tolist()) == {0, 1}]
    assert mixed
    assert all(row.version == 0 for row in rows)
    assert all(len(row.versions) == len(row.output_tokens) for row in rows)
    assert all((np.diff(row.versions) >= 0).all() for row in rows)
    # and nothing is lost: each lease's rollouts are there, once
    with closing(Ledger(works.site.run_dir / STATE_FILE)) as ledger:
        events = list(ledger.events())
    granted = [event.digest for event in events if isinstance(event, LeaseGranted)]
    received = [event.lease for event in events if isinstance(event, SubmissionReceived)]
    assert set(granted[:2]) <= set(received)
    assert len(received) == len(set(received)) == submissions
    assert len({(row.lease, row.group, row.sample) for row in rows}) == len(rows) == 4 * submissions
