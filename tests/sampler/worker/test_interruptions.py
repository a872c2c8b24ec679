"""Coordinators that go away, and workers that are killed: nothing is lost, nothing comes twice."""

from __future__ import annotations

import random
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from runspec.core.run_files import STATE_FILE
from tests.sampler.worker.works import free_port, site_of, working
from tests.verify.coordinator.deployment import Site, tiny_spec
from tests.waiting import eventually
from verify.coordinator.ledger.ledger import Ledger
from verify.coordinator.machine.events import LeaseGranted, SubmissionReceived
from verify.formats.lease import MAX_OPEN_LEASES
from verify.formats.submission import decode_rollouts

KILLS = 4


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def until_answers(site: Site) -> Callable[[], bool]:
    port = int(site.url.rsplit(":", 1)[1])

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return answers


@pytest.mark.slow
def test_a_coordinator_that_is_gone_is_waited_for_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with site_of(tmp_path, tiny_spec()) as works:
        port = free_port()
        with ended(works.site.process(port)):
            eventually(until_answers(works.site), "the coordinator")
            member = works.busy()
        member.engine.at_once = True
        member.engine.finish()
        eventually(
            lambda: "waiting for the coordinator" in caplog.text, "it says for whom it waits"
        )
        assert not member.ended()

        with ended(works.site.process(port)):
            eventually(lambda: len(works.submissions()) >= 2, "what it had is handed in")
            member.leave()
        assert member.failure is None


@pytest.mark.slow
def test_a_coordinator_that_stays_away_ends_the_worker_with_its_address(tmp_path: Path):
    with site_of(tmp_path, tiny_spec()) as works:
        with ended(works.site.process(free_port())):
            eventually(until_answers(works.site), "the coordinator")
            member = works.busy(deadline_s=1.0)
        member.engine.finish()

        eventually(member.ended, "its end")
        assert isinstance(member.failure, UserError)
        assert member.failure.place == f"coordinator {works.site.url}"


@pytest.mark.slow
def test_a_worker_that_is_killed_at_any_moment_leaves_whole_submissions_and_repeats_none(
    tmp_path: Path,
):
    # given a step that always has something to do, and leases that outlast slow starts
    spec = tiny_spec(lease_timeout="1h")
    algorithm = spec.algorithm.model_copy(update={"prompts_per_step": 10_000})
    spec = spec.model_copy(update={"algorithm": algorithm})
    key, rng = SigningKey.generate(), random.Random(6)
    key.save(key_file := tmp_path / "worker.key")
    with site_of(tmp_path, spec) as works, works.site.serving():
        # when a worker is killed again and again
        for _ in range(KILLS):
            before = len(works.submissions())
            with working(works.site, key_file):
                threading.Event().wait(rng.uniform(0.0, 0.5))
            assert len(works.submissions()) >= before
        with working(works.site, key_file):
            count = len(works.submissions())
            eventually(lambda: len(works.submissions()) >= count + MAX_OPEN_LEASES, "its last work")
    # while it serves, one may lie there that it does not take: its worker was killed in between
    submissions = works.submissions()

    # then each submission is whole, and each lease was granted once and answered once
    with closing(Ledger(works.site.run_dir / STATE_FILE)) as ledger:
        events = list(ledger.events())
    granted = [event for event in events if isinstance(event, LeaseGranted)]
    received = [event for event in events if isinstance(event, SubmissionReceived)]
    assert len({event.lease.seed for event in granted}) == len(granted)
    assert len({event.lease for event in received}) == len(received) >= len(submissions) - 1
    unanswered = {event.digest for event in granted} - {event.lease for event in received}
    assert len(unanswered) <= MAX_OPEN_LEASES
    for path in submissions:
        assert digest_bytes(path.read_bytes()) == path.stem
        rows = decode_rollouts(path.read_bytes(), max_rows=9, max_bytes=1 << 20)
        assert [(row.group, row.sample) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
