"""Runs without workers over HTTP: signed rows of documents, and learner islands."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from runspec.core.canonical import canonical_json, digest_bytes
from runspec.core.errors import UserError
from runspec.core.process import RunStopped
from runspec.core.run_files import step_folder
from runspec.core.schema import RunSpec
from runspec.core.signed import SigningKey
from tests.verify.audit.tampering import work
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site
from tests.verify.coordinator.documents import ROWS, documents_spec
from tests.verify.coordinator.filled import Filled, digest
from tests.verify.coordinator.island_run import (
    NAMES,
    island,
    islands_spec,
    offer,
    outer,
    sampled_spec,
)
from tests.verify.coordinator.over_http import polled, post, status
from tests.waiting import eventually
from verify.audit import audit
from verify.coordinator.ledger import closed_steps, record_rollback
from verify.coordinator.machine import filling
from verify.coordinator.machine.events import IllegalTransition, RolledBack, StepClosed
from verify.coordinator.machine.stalls import waited_for
from verify.coordinator.machine.state import Policy
from verify.formats.batch import (
    Contribution,
    RangeManifest,
    RowRange,
    divide,
    open_ranges,
    sign_offer,
)
from verify.island_client import Committed, IslandRefused, Waiting

STEPS = 9


def opened(folder: Path, spec: RunSpec) -> Site:
    site = Site(folder, spec)
    site.sign_roles()  # no validators
    return site


def findings(site: Site) -> list[object]:
    return list(audit(site.run_dir, root_key=site.root.public_hex).findings)


# -- Documents: how far ahead rows are signed ----------------------------------------------------


def run_of(**changes: int) -> Filled:
    return Filled(Policy.of(documents_spec(**changes)))


@pytest.mark.parametrize("publish_every", [1, 2, 10])
@pytest.mark.parametrize("start", [0, 7])
def test_the_learner_always_finds_its_next_step_signed(publish_every: int, start: int) -> None:
    # given a new run, or one that was rolled back to a step between two versions
    run = run_of(steps=25, publish_every=publish_every)
    for version in range(0, start, publish_every):
        run.publish(version)
        run.advance()
    if start:
        run.record(RolledBack(run.now, start))
        assert run.advance() == []
    run.publish(start)
    run.advance()
    newest = start
    for step in range(start, 25):
        # then each step is signed before the learner trains it, and not far ahead
        assert step < run.state.next_close <= newest + 2 * publish_every
        if (step + 1) % publish_every == 0 or step + 1 == 25:
            # and the steps up to the next version are signed although this one arrives late
            assert run.state.next_close >= min(25, step + 1 + publish_every)
            newest = step + 1
            run.publish(newest)
            run.advance()
    assert run.state.finished
    for step in (24, 25):
        with pytest.raises(IllegalTransition, match="in order"):
            run.record(StepClosed(run.now, step, (), "signed"))


def test_only_the_first_version_has_a_deadline() -> None:
    run = run_of()
    longest = run.state.policy.deadline_s
    assert filling.decide_close(run.state, run.now + longest - 1.0) is None
    assert filling.next_due(run.state, run.now) == run.now + longest
    run.now += longest
    assert "waited for the publisher: version 0" in run.stalled().reason
    assert "algorithm.fill" not in run.stalled().remedy
    # when it is published, then the learner may take as long as it likes
    run.publish(0)
    run.advance()
    assert filling.decide_close(run.state, run.now + 100.0 * longest) is None
    assert filling.next_due(run.state, run.now) is None
    assert waited_for(run.state).startswith("the learner: version 1 or a newer one")


# -- Documents over HTTP -------------------------------------------------------------------------


def batch_path(site: Site, step: int) -> Path:
    return step_folder(site.run_dir, step) / "batch.json"


def signed(site: Site) -> list[int]:
    return [step for step in range(STEPS + 1) if batch_path(site, step).exists()]


def rows(site: Site, steps: range) -> list[RowRange]:
    """The rows that are signed for some steps."""
    found = []
    for step in steps:
        eventually(batch_path(site, step).exists, f"the rows of step {step}")
        found.append(manifest(site, batch_path(site, step).read_bytes(), step).rows)
    return found


def manifest(site: Site, data: bytes, step: int) -> RangeManifest:
    keys = frozenset({site.coordinator.public_hex})
    return open_ranges(data, coordinators=keys, run=RUN, step=step, rows_per_step=ROWS)


def test_rows_are_signed_ahead_of_the_newest_version_and_again_after_a_rollback(tmp_path: Path):
    spec = documents_spec(steps=STEPS)
    site = opened(tmp_path, spec)
    with site.origin():
        with site.serving():
            assert status(site)["waiting_for"].startswith("the publisher: version 0 is needed")
            site.publish(0)
            before = rows(site, range(4))
            assert before == [RowRange(ROWS * s, ROWS * (s + 1)) for s in range(4)]
            eventually(lambda: status(site)["steps_closed"] == 4, "the status")
            words = "the learner: version 1 or a newer one is needed, the newest published is 0"
            assert status(site)["waiting_for"] == words and signed(site) == [0, 1, 2, 3]
            # workers are refused, and what is public is served
            client = site.client(SigningKey.generate())
            for refused in (lambda: client.register("near", {}), lambda: client.lease(0.0)):
                with pytest.raises(UserError, match=r"404, a run of algorithm\.kind pretrain"):
                    refused()
            assert client.spec() == spec and client.site().files == []
        # given a kill between the ledger and the file
        document = batch_path(site, 3).read_bytes()
        batch_path(site, 3).unlink()
        # when it starts again, then the same bytes are there, and the next steps follow
        site.publish(2)
        with site.serving():
            before += rows(site, range(4, 6))
            assert batch_path(site, 3).read_bytes() == document
        # given a rollback to a step between two versions
        assert closed_steps(site.run_dir, spec) == 6
        for step in (3, 4, 5):
            shutil.rmtree(step_folder(site.run_dir, step))
        record_rollback(site.run_dir, spec, 3)
        (site.store / RUN / "latest.json").unlink()
        site.new_coordinator()
        with site.serving():
            assert signed(site) == [0, 1, 2]
            # when the learner publishes the version from which it goes on, then the same rows come
            site.publish(3)
            assert rows(site, range(3, 7)) == [*before[3:], RowRange(36, 42)]
            # and the next version, which is again one of every second step, comes in time
            site.publish(6)
            rows(site, range(7, STEPS))
            # then the run is finished, and the learner publishes what is left
            site.publish(STEPS)
            eventually(lambda: status(site)["newest_version"] == STEPS, "the last version")
            found = status(site)
            assert (found["state"], found["rows_signed"]) == ("finished", STEPS * ROWS)
    assert findings(site) == []


# -- Learner islands -----------------------------------------------------------------------------


def site_of(folder: Path, **settings: Any) -> Site:
    site = opened(folder, islands_spec(**settings))
    site.publish(0)
    return site


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Site]:
    """Three islands; a step waits for all of them."""
    site = site_of(tmp_path)
    with site.origin():
        yield site


def committed(site: Site, name: str, step: int) -> Committed:
    while not isinstance(found := island(site, name).record(step, DEADLINE_S), Committed):
        pass
    return found


def send(site: Site, name: str, step: int = 0, **changes: Any) -> bool:
    """An offer of an island that has read the step's manifest."""
    client = island(site, name)
    polled(partial(client.batch, step))
    return client.offer(offer(name, step, **changes))


def commit(site: Site, step: int) -> Committed:
    """A step that all islands make."""
    for name in NAMES:
        assert send(site, name, step)
    return committed(site, "b", step)


def test_islands_offer_read_who_contributed_and_report_one_outer_state(patient: Site) -> None:
    with patient.serving(), ThreadPoolExecutor(1) as pool:
        a, b, c = (island(patient, name) for name in NAMES)
        data = polled(partial(b.batch, 0))
        assert manifest(patient, data, 0).shares == divide(0, ROWS, NAMES)
        assert a.record(0, 0.0) == Waiting(dict.fromkeys(NAMES, "no share offered"), [])
        assert a.result(0, digest("record"), outer(0)) is None
        # when two have offered, one of them twice, then the step waits for the third
        for client, name in ((c, "c"), (a, "a"), (a, "a")):
            assert client.offer(offer(name))
        assert a.record(0, 0.02) == Waiting({"b": "no share offered"}, ["a", "c"])
        found = status(patient)
        assert found["waiting_for"] == "the share of step 0 of island b (no share offered)"
        assert found["islands"]["waiting_for"] == {"b": "no share offered"}
        # and an island that contradicts another is refused
        with pytest.raises(IslandRefused, match=r"islands b and .* differ at step 0: data"):
            b.offer(offer("b", data=digest("other")))
        with pytest.raises(IslandRefused, match="step 1: the next step to commit is 0"):
            b.offer(offer("b", 1))
        waiting = pool.submit(committed, patient, "a", 0)
        assert b.offer(offer("b"))
        # then all read the same signed record, in the order of the spec
        first = waiting.result(DEADLINE_S)
        assert first == b.record(0, 0.0)
        record = first.record
        assert record.contributors == [Contribution.of(offer(name)) for name in NAMES]
        assert (record.base, record.dropped, record.previous) == (digest("outer", 0), [], None)
        # and the first outer state counts
        assert b.result_of(0) is None
        for client in (a, b, a):
            assert client.result(0, first.digest, outer(0))
        with pytest.raises(IslandRefused, match=r"island b has outer state .* but island a has"):
            b.result(0, first.digest, digest("other"))
        assert b.result_of(0) == outer(0)
        with pytest.raises(IslandRefused, match=r"island b starts step 1 .* island a reported"):
            b.offer(offer("b", 1, base=digest("other")))
    assert findings(patient) == []


def test_large_and_lost_shares_are_dropped_by_the_record_and_counted(tmp_path: Path) -> None:
    site = site_of(tmp_path, quorum=2, grace="1h", max_norm=5.0)
    with site.origin(), site.serving(), ThreadPoolExecutor(1) as pool:
        a, b = island(site, "a"), island(site, "b")
        assert send(site, "a", norm=7.0)
        found = a.record(0, 0.0)
        assert isinstance(found, Waiting)
        assert found.waiting_for["a"] == "its share has norm 7, learner.islands.max_norm is 5"
        first = commit(site, 0)
        # given an island that has all shares, when another one has not
        assert a.result(0, first.digest, outer(0)) is False
        assert b.lost(0, "a")
        second = committed(site, "c", 0)
        assert [drop.island for drop in second.record.dropped] == ["a"]
        # then nobody goes on from the first record, and the others from the second
        assert a.result(0, first.digest, outer(0)) is None
        waiting = pool.submit(b.result, 0, second.digest, outer(0), DEADLINE_S)
        assert island(site, "c").result(0, second.digest, outer(0), DEADLINE_S) is True
        assert waiting.result(DEADLINE_S) is True and not b.lost(0, "c")
        assert not send(site, "a")  # it is too late, and joins the next step
        found = status(site)["islands"]
        members = {each["name"]: each for each in found["members"]}
        assert (found["committed"], found["deadline"]) == (1, None)
        assert [members[name]["committed"] for name in NAMES] == [0, 1, 1]
        assert members["a"]["last_dropped"].startswith("step 0: island b could not fetch")
        with urlopen(f"{site.url}/metrics") as answer:
            text = answer.read().decode()
        assert 'runspec_coordinator_island_share_bytes_total{island="c"} 400.0' in text
        assert "runspec_coordinator_islands_waited_for 3.0" in text
    assert findings(site) == []


def test_only_islands_may_ask_and_each_for_itself(patient: Site) -> None:
    with patient.serving():
        a, theirs = patient.islands["a"], sign_offer(offer("b"), patient.islands["b"])
        forged = sign_offer(offer("a"), patient.islands["b"])
        read, send = "/v1/islands/records/0", "/v1/islands/offer"
        report, lose = "/v1/islands/result", "/v1/islands/lost"
        good = {"step": 0, "record": outer(0), "digest": outer(0)}
        for key, path, body, code in (
            (patient.coordinator, send, theirs, 403),
            (SigningKey.generate(), read, b"", 403),
            (a, send, theirs, 403),
            (a, send, forged, 400),
            *((a, report, good | bad, 400) for bad in ({"step": -1}, {"record": "x"}, {"x": 1})),
            *((a, lose, {"step": bad, "island": "b"}, 400) for bad in (-1, True)),
            *((a, f"{read}?wait={wait}", b"", 400) for wait in ("x", "-1", "inf", "nan")),
            # an island's key is no worker's, and cannot be banned
            (patient.coordinator, "/v1/operator/ban", {"key": a.public_hex, "reason": "x"}, 409),
        ):
            data = body if isinstance(body, bytes) else canonical_json(body)
            answer = post(patient, key, path, data, method="POST" if data else "GET")
            assert answer.status_code == code, (path, body)
        # and a client believes the pinned root alone
        commit(patient, 0)
        patient.root = SigningKey.generate()
        with pytest.raises(UserError, match="this run has a new root"):
            island(patient, "a").record(0, 0.0)
    with pytest.raises(UserError, match="cannot be reached") as unreached:
        island(patient, "a", deadline_s=0.1).record(0, 0.0)
    assert "ssl:" not in str(unreached.value)


def test_a_restart_keeps_what_was_committed_and_a_rollback_opens_the_steps_again(patient: Site):
    with patient.serving():
        first = commit(patient, 0)
        assert island(patient, "a").result(0, first.digest, outer(0))
        patient.publish(1)
        for name in ("a", "b"):
            send(patient, name, 1)
    with patient.serving():
        c = island(patient, "c")
        assert (c.record(0, 0.0), c.result_of(0)) == (first, outer(0))
        assert c.record(1, 0.0) == Waiting({"c": "no share offered"}, ["a", "b"])
        send(patient, "c", 1)
        second = committed(patient, "a", 1)
        assert second.record.previous == first.digest
        assert island(patient, "a").result(1, second.digest, outer(1))
    record_rollback(patient.run_dir, islands_spec(), 1)
    for path in (patient.run_dir / "rollouts").glob("step_*/batch.json"):
        if path.parent.name != "step_0":
            path.unlink()
    patient.new_coordinator()
    with patient.serving():
        assert status(patient)["islands"]["committed"] == 1
        a = island(patient, "a")
        with pytest.raises(UserError, match="404, the record of step 0 is from before a rollback"):
            a.record(0, 0.0)
        assert (a.result_of(0), a.result_of(1)) == (outer(0), None)
        # and an island is told from where on it can follow the records
        a.announce("http://127.0.0.1:9", 1, outer(0))
        found = island(patient, "b").outer_states()
        assert (found.committed, found.oldest) == (1, 1)
        stored = [(each.island, each.version, each.digest) for each in found.stored]
        assert stored == [("a", 1, outer(0))]
        patient.publish(1)
        # then the chain of records goes on
        assert commit(patient, 1).record.previous == first.digest
    assert findings(patient) == []


def test_a_missing_quorum_and_a_version_that_is_not_committed_stop_it(tmp_path: Path) -> None:
    site = site_of(tmp_path / "one", deadline="50ms")
    with site.origin(), site.serving() as task:
        polled(partial(island(site, "b").batch, 0))
        with suppress(UserError):  # it may end before it answers
            island(site, "b", deadline_s=1.0).offer(offer("b"))
        eventually(task.done, "its end")
        with pytest.raises(RunStopped, match=r"step 0 stalled.*island a .*, island c "):
            task.result()
    site = site_of(tmp_path / "two")
    with site.origin(), site.serving() as task:
        site.publish(1)
        eventually(task.done, "its end")
        with pytest.raises(RunStopped, match="only 0 steps are committed"):
            task.result()


def test_an_island_reads_the_rollouts_that_a_manifest_names(tmp_path: Path) -> None:
    site = Site(tmp_path, sampled_spec(quorum=1, grace="10ms"))
    site.publish(0)
    with site.origin(), site.serving():
        client, worker = island(site, "b"), site.worker()
        with pytest.raises(UserError, match="404, no manifest of step 0 names files"):
            client.file(0, "x.json")
        work(site, worker), work(site, worker)
        batch = site.batch(0)
        assert [(s.first, s.last) for s in batch.shares] == [(0, 1), (1, 3), (3, 4)]
        for group in batch.groups:
            table = client.file(0, f"{group.submission}.safetensors")
            verdict = client.file(0, f"{group.submission}.verdict.safetensors")
            assert (digest_bytes(table), digest_bytes(verdict)) == (group.submission, group.verdict)
        with pytest.raises(UserError, match="the manifest names no file"):
            client.file(0, "batch.json")


def test_roles_without_an_islands_key_stop_the_start(patient: Site) -> None:
    del patient.islands["b"]
    patient.sign_roles()
    with pytest.raises(UserError, match="keys of learner islands b"), patient.serving():
        pass
