"""Work that is made and not taken in is not lost with its process: a real coordinator, no vLLM."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from runspec.core.spec.schema import Backlog
from sampler.worker.outbox import Made, Outbox
from tests.sampler.worker.obedient import outbox_in
from tests.sampler.worker.works import working
from tests.verify.coordinator.deployment import (
    DEADLINE_S,
    RUN,
    Site,
    submission,
    tiny_spec,
    verdict,
)
from tests.waiting import eventually
from verify.client import CoordinatorClient
from verify.coordinator.edge import backlog
from verify.formats.lease import lease_digest, open_lease
from verify.formats.submission import sign_submission

START_S = 60.0


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A run in which one submission may wait for its verdict."""
    monkeypatch.setattr(backlog, "FIRST_RETRY_S", 1)
    spec = tiny_spec()
    verify = spec.verify.model_copy(update={"backlog": Backlog(submissions=1)})
    site = Site(tmp_path, spec.model_copy(update={"verify": verify}))
    site.publish(0)
    with site.origin():
        yield site


def status(site: Site) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{site.url}/v1/status", trust_env=False).json()
    return found


def judge(site: Site, validator: CoordinatorClient) -> str:
    """The next submission's verdict; its digest."""
    item = validator.next_submission(DEADLINE_S)
    assert item is not None
    lease = open_lease(item.lease, coordinators=validator.roles().coordinator)
    validator.verdict(*verdict(item.submission, lease, site.validator))
    return item.submission


def test_what_was_deferred_when_a_worker_had_to_end_is_sent_at_its_next_start(
    site: Site, tmp_path: Path
):
    key = SigningKey.generate()
    key.save(tmp_path / "worker.key")
    with site.serving():
        validator = site.client(site.validator)
        # given one submission that waits for its verdict, and a worker told to come again with its
        # own
        with working(site, tmp_path / "worker.key") as process:
            eventually(lambda: status(site)["backlog"]["deferred"] == 1, "a deferral")
            # when it is told to end
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_S) == 0
        # then the submission is in its folder, and its lease is not given back
        (kept,) = tmp_path.glob("worker/outbox/*/*.submission")
        table = kept.read_bytes().partition(b"\n")[2]
        (mine,) = status(site)["workers"]
        assert mine["open_leases"] >= 1
        folder = site.run_dir / "rollouts" / "step_0"
        assert len(list(folder.glob("*.safetensors"))) == 1
        judge(site, validator)
        # and when it starts again, then those bytes are sent, once, and nobody samples them again
        with working(site, tmp_path / "worker.key"):
            assert judge(site, validator) == digest_bytes(table)
            eventually(lambda: not kept.exists(), "it is forgotten")
    received = [path.read_bytes() for path in folder.glob("*.safetensors")]
    assert received.count(table) == 1


# -- The folder alone ------------------------------------------------------------------------------


def made(key: SigningKey, lease: str, *, run: str = RUN, table: bytes = b"table") -> Made:
    envelope = sign_submission(table, run=run, step=0, index=0, lease=lease, key=key)
    return Made(envelope, table)


def test_what_is_kept_comes_back_and_what_was_settled_does_not(tmp_path: Path):
    key, (one, two) = SigningKey.generate(), ("a1" * 32, "b2" * 32)
    outbox = outbox_in(tmp_path, key)
    outbox.put(one, made(key, one)), outbox.put(two, made(key, two))
    outbox.settle(two)
    assert outbox.keep() == [one]

    again = outbox_in(tmp_path, key)
    assert again.load() == {one: made(key, one)}
    again.settle(one)
    assert outbox_in(tmp_path, key).load() == {}


@pytest.mark.parametrize("flaw", ["table", "envelope", "run", "worker", "name", "size", "no table"])
def test_what_is_damaged_or_not_ours_is_removed_and_said(
    tmp_path: Path, flaw: str, caplog: pytest.LogCaptureFixture
):
    key, lease = SigningKey.generate(), "a1" * 32
    right = made(key, lease)
    wrong = {
        "table": Made(right.envelope, b"tablf"),
        "envelope": Made(right.envelope[:-1], right.table),
        "run": made(key, lease, run="other"),
        "worker": made(SigningKey.generate(), lease),
        "name": made(key, "b2" * 32),
        "size": made(key, lease, table=bytes((1 << 20) + 1)),
        "no table": right,
    }[flaw]
    outbox = outbox_in(tmp_path, key)
    outbox.put(lease, wrong)
    outbox.keep()
    if flaw == "no table":
        next(tmp_path.rglob("*.submission")).write_bytes(right.envelope)

    with caplog.at_level(logging.WARNING):
        assert outbox_in(tmp_path, key).load() == {}
    assert "is no submission to send" in caplog.text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_disk_that_is_full_loses_the_submission_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_bytes(b"")
    key, lease = SigningKey.generate(), "a1" * 32
    full = Outbox(
        tmp_path / "file" / "outbox", run=RUN, worker=key.public_hex, max_bytes=9, log=logging.root
    )
    full.put(lease, made(key, lease))
    assert full.keep() == []
    assert "its lease can be sampled again" in caplog.text


def test_a_held_lease_does_not_come_again_and_is_not_released(tmp_path: Path):
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    with site.origin(), site.serving():
        key, first = site.worker()
        data = first.lease(DEADLINE_S)
        assert data is not None
        lease = open_lease(data, coordinators=first.roles().coordinator)
        second = site.client(key)  # the next process
        second.hold(lease_digest(data))
        other = second.lease(DEADLINE_S)
        assert other is not None and other != data
        assert second.release(but=[lease_digest(data)]) == 1
        second.submit(*submission(data, lease, key))
