"""Learner islands over HTTP: offers, records, results, and what an island reads of the run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from runspec.core.process import RunStopped
from runspec.core.roles import open_roles
from runspec.core.spec.resolved import dump_resolved
from tests.verify.audit.tampering import work
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site
from tests.verify.coordinator.documents import ROWS
from tests.verify.coordinator.filled import digest
from tests.verify.coordinator.island_run import (
    NAMES,
    island,
    islands_spec,
    offer,
    outer,
    sampled_spec,
)
from tests.verify.coordinator.over_http import post, status
from tests.waiting import eventually
from verify.audit.replay import audit
from verify.coordinator.services.operator import record_rollback
from verify.formats.batch import open_batch
from verify.formats.islands import Contribution, divide, sign_offer
from verify.formats.ranges import RangeManifest, open_ranges
from verify.island_client import Committed, IslandRefused, Waiting


def site_of(folder: Path, **settings: Any) -> Site:
    site = Site(folder, islands_spec(**settings))
    site.sign_roles()  # no validators
    site.publish(0)
    return site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Three islands, a quorum of two, and next to no grace time."""
    site = site_of(tmp_path, quorum=2, grace="10ms", max_norm=5.0)
    with site.origin():
        yield site


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Site]:
    """Three islands; a step waits for all of them."""
    site = site_of(tmp_path)
    with site.origin():
        yield site


def manifest(site: Site, data: bytes, step: int) -> RangeManifest:
    keys = frozenset({site.coordinator.public_hex})
    return open_ranges(data, coordinators=keys, run=RUN, step=step, rows_per_step=ROWS)


def committed(site: Site, name: str, step: int) -> Committed:
    found = island(site, name).record(step, DEADLINE_S)
    assert isinstance(found, Committed)
    return found


def send(site: Site, name: str, step: int = 0, **changes: Any) -> bool:
    """An offer of an island that has read the step's manifest."""
    client = island(site, name)
    assert client.batch(step, DEADLINE_S)
    return client.offer(offer(name, step, **changes))


def commit(site: Site, step: int) -> Committed:
    """A step that all islands make."""
    for name in NAMES:
        assert send(site, name, step)
    return committed(site, "b", step)


def test_islands_offer_and_read_who_contributed(patient: Site) -> None:
    with patient.serving(), ThreadPoolExecutor(1) as pool:
        a, b, c = (island(patient, name) for name in NAMES)
        data = b.batch(0, DEADLINE_S)
        assert data is not None
        assert manifest(patient, data, 0).shares == divide(0, ROWS, NAMES)
        assert a.record(0, 0.0) == Waiting(dict.fromkeys(NAMES, "no share offered"), [])
        # when two have offered, one of them twice, then the step waits for the third
        for client, name in ((c, "c"), (a, "a"), (a, "a")):
            assert client.offer(offer(name))
        assert a.record(0, 0.02) == Waiting({"b": "no share offered"}, ["a", "c"])
        found = status(patient)
        assert found["waiting_for"] == "the share of step 0 of island b (no share offered)"
        assert found["islands"]["waiting_for"] == {"b": "no share offered"}
        waiting = pool.submit(a.record, 0, DEADLINE_S)
        assert b.offer(offer("b"))
        # then all read the same signed record, in the order of the spec
        first = waiting.result(DEADLINE_S)
        assert isinstance(first, Committed) and first == b.record(0, 0.0)
        record = first.record
        assert record.contributors == [Contribution.of(offer(name)) for name in NAMES]
        assert (record.base, record.dropped, record.previous) == (digest("outer", 0), [], None)
        assert record.codec == "float16"
        # and the next record names this one
        patient.publish(1)
        assert commit(patient, 1).record.previous == first.digest
    assert audit(patient.run_dir, root_key=patient.root.public_hex).findings == []


def test_the_status_and_the_metrics_count_shares(site: Site) -> None:
    with site.serving():
        send(site, "a")
        send(site, "c")
        committed(site, "b", 0)
        found = status(site)["islands"]
        assert (found["committed"], found["deadline"]) == (1, None)
        members = {each["name"]: each for each in found["members"]}
        assert [members[name]["committed"] for name in NAMES] == [1, 0, 1]
        assert [members[name]["bytes"] for name in NAMES] == [400, 0, 400]
        assert members["b"]["last_dropped"].startswith("step 0: no share offered")
        assert all(members[name]["silent_s"] < DEADLINE_S for name in NAMES)
        with urlopen(f"{site.url}/metrics") as answer:
            text = answer.read().decode()
        assert "runspec_coordinator_islands_committed_steps_total 1.0" in text
        assert 'runspec_coordinator_island_share_bytes_total{island="c"} 400.0' in text
        assert 'runspec_coordinator_island_dropped_steps_total{island="b"} 1.0' in text
        assert "runspec_coordinator_islands_waited_for 3.0" in text


def test_a_late_island_reads_that_it_was_dropped_and_joins_the_next_step(site: Site) -> None:
    with site.serving():
        for name in ("a", "b"):
            assert send(site, name)
        record = committed(site, "c", 0).record
        assert [drop.island for drop in record.dropped] == ["c"]
        assert not send(site, "c")
        site.publish(1)
        assert send(site, "c", 1)


def test_a_share_above_the_bound_is_dropped_by_the_record(site: Site) -> None:
    with site.serving():
        assert send(site, "a", norm=7.0)
        found = island(site, "a").record(0, 0.0)
        assert isinstance(found, Waiting)
        assert found.waiting_for["a"] == "its share has norm 7, learner.islands.max_norm is 5"
        for name in ("b", "c"):
            send(site, name)
        assert [drop.island for drop in committed(site, "a", 0).record.dropped] == ["a"]
    assert audit(site.run_dir, root_key=site.root.public_hex).findings == []


def test_an_island_that_contradicts_another_is_refused(patient: Site) -> None:
    with patient.serving():
        send(patient, "a")
        with pytest.raises(IslandRefused, match=r"islands b and a differ at step 0: data"):
            send(patient, "b", data=digest("other"))
        with pytest.raises(
            IslandRefused, match="an offer for step 1: the next step to commit is 0"
        ):
            send(patient, "b", 1)


def test_the_first_outer_state_counts_and_another_is_refused(patient: Site) -> None:
    with patient.serving():
        a, b = island(patient, "a"), island(patient, "b")
        assert a.result(0, digest("record"), outer(0)) is None
        record = commit(patient, 0).digest
        assert b.result_of(0) is None
        for client in (a, b, a):
            assert client.result(0, record, outer(0))
        with pytest.raises(IslandRefused, match=r"island b has outer state .* but island a has"):
            b.result(0, record, digest("other"))
        assert b.result_of(0) == outer(0)
        # then nobody may start the next step from another state
        with pytest.raises(IslandRefused, match=r"island b starts step 1 .* island a reported"):
            b.offer(offer("b", 1, base=digest("other")))


def test_a_share_that_cannot_be_fetched_is_dropped_by_a_new_record(tmp_path: Path) -> None:
    site = site_of(tmp_path, quorum=2, grace="1h")
    with site.origin(), site.serving():
        a, b = island(site, "a"), island(site, "b")
        first = commit(site, 0)
        # an island has all shares, but another one has not
        assert a.result(0, first.digest, outer(0)) is False
        assert b.lost(0, "a")
        second = committed(site, "c", 0)
        assert [drop.island for drop in second.record.dropped] == ["a"]
        # then nobody goes on from the first record, and the others from the second
        assert a.result(0, first.digest, outer(0)) is None
        assert b.result(0, second.digest, digest("second")) is True
        assert not b.lost(0, "c")  # b alone is no quorum
        site.publish(1)
        for name in NAMES:
            assert send(site, name, 1, base=digest("second"))
        third = committed(site, "b", 1)
        assert third.record.previous == second.digest
        # and a record is final once two have reported
        assert a.result(1, third.digest, outer(1)) is False
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(a.result, 1, third.digest, outer(1), DEADLINE_S)
            assert island(site, "c").result(1, third.digest, outer(1)) is True
            assert waiting.result(DEADLINE_S) is True
    assert audit(site.run_dir, root_key=site.root.public_hex).findings == []


def test_only_islands_may_ask_and_each_for_itself(patient: Site) -> None:
    with patient.serving():
        signed = sign_offer(offer("b"), patient.islands["b"])
        for key, code in ((SigningKey.generate(), 403), (patient.coordinator, 403)):
            assert post(patient, key, "/v1/islands/offer", signed).status_code == code
            path = "/v1/islands/records/0"
            assert post(patient, key, path, b"", method="GET").status_code == code
        a = patient.islands["a"]
        answer = post(patient, a, "/v1/islands/offer", signed)
        assert (answer.status_code, answer.json()["error"]) == (403, "the offer is of island b")
        forged = sign_offer(offer("a"), patient.islands["b"])
        assert post(patient, a, "/v1/islands/offer", forged).status_code == 400
        good = {"step": 0, "record": outer(0), "digest": outer(0)}
        for bad in ({"step": -1}, {"step": "0"}, {"record": "x"}, {"digest": 7}, {"more": 1}):
            answer = post(patient, a, "/v1/islands/result", canonical_json(good | bad))
            assert answer.status_code == 400
        for bad in ({"step": -1}, {"step": True}, {"island": 7}):
            body = canonical_json({"step": 0, "island": "b"} | bad)
            assert post(patient, a, "/v1/islands/lost", body).status_code == 400
        for wait in ("x", "-1", "inf", "nan"):
            path = f"/v1/islands/records/0?wait={wait}"
            assert post(patient, a, path, b"", method="GET").status_code == 400
        # an island's key is no worker's, and cannot be banned
        body = canonical_json({"key": a.public_hex, "reason": "test"})
        banned = post(patient, patient.coordinator, "/v1/operator/ban", body)
        assert banned.status_code == 409


def test_a_restart_keeps_offers_records_and_results(patient: Site) -> None:
    with patient.serving():
        first = commit(patient, 0)
        assert island(patient, "a").result(0, first.digest, outer(0))
        patient.publish(1)
        for name in ("a", "b"):
            send(patient, name, 1)
    with patient.serving():
        assert island(patient, "c").record(0, 0.0) == first
        assert island(patient, "c").result_of(0) == outer(0)
        assert island(patient, "c").record(1, 0.0) == Waiting({"c": "no share offered"}, ["a", "b"])
        send(patient, "c", 1)
        assert committed(patient, "a", 1).record.previous == first.digest


def test_a_missing_quorum_stops_the_coordinator_and_names_the_islands(tmp_path: Path) -> None:
    site = site_of(tmp_path, deadline="50ms")
    with site.origin(), site.serving() as task:
        send(site, "b")
        eventually(task.done, "its end")
        with pytest.raises(RunStopped, match=r"step 0 stalled.*island a .*, island c "):
            task.result()


def test_a_version_that_is_not_committed_stops_the_coordinator(patient: Site) -> None:
    with patient.serving() as task:
        assert island(patient, "a").batch(1, DEADLINE_S)
        patient.publish(1)
        eventually(task.done, "its end")
        with pytest.raises(RunStopped, match="only 0 steps are committed"):
            task.result()


def test_a_rollback_opens_the_steps_again(patient: Site) -> None:
    with patient.serving():
        first = commit(patient, 0)
        assert island(patient, "a").result(0, first.digest, outer(0))
        patient.publish(1)
        assert island(patient, "a").result(1, commit(patient, 1).digest, outer(1))
    record_rollback(patient.run_dir, islands_spec(), 1)
    for path in (patient.run_dir / "rollouts").glob("step_*/batch.json"):
        if path.parent.name != "step_0":
            path.unlink()
    patient.new_coordinator()
    with patient.serving():
        assert status(patient)["islands"]["committed"] == 1
        with pytest.raises(UserError, match="404, the record of step 0 is from before a rollback"):
            island(patient, "a").record(0, 0.0)
        assert (island(patient, "a").result_of(0), island(patient, "a").result_of(1)) == (
            *(outer(0), None),
        )
        # and an island is told from where on it can follow the records
        island(patient, "a").announce("http://127.0.0.1:9", 1, outer(0))
        found = island(patient, "b").outer_states()
        assert (found.committed, found.oldest) == (1, 1)
        assert [(each.island, each.version, each.digest) for each in found.stored] == [
            ("a", 1, outer(0))
        ]
        patient.publish(1)
        # then the chain of records goes on
        assert commit(patient, 1).record.previous == first.digest
    assert audit(patient.run_dir, root_key=patient.root.public_hex).findings == []


def test_an_island_reads_the_rollouts_that_a_manifest_names(tmp_path: Path) -> None:
    site = Site(tmp_path, sampled_spec(quorum=1, grace="10ms"))
    site.publish(0)
    with site.origin(), site.serving():
        client = island(site, "b")
        assert client.batch(0, 0.0) is None
        with pytest.raises(UserError, match="404, no manifest of step 0 names files"):
            client.file(0, "x.json")
        worker = site.worker()
        work(site, worker)
        work(site, worker)
        data = client.batch(0, DEADLINE_S)
        assert data is not None
        keys = frozenset({site.coordinator.public_hex})
        batch = open_batch(data, coordinators=keys, run=RUN, step=0)
        assert [(s.first, s.last) for s in batch.shares] == [(0, 1), (1, 3), (3, 4)]
        for group in batch.groups:
            table = client.file(0, f"{group.submission}.safetensors")
            assert digest_bytes(table) == group.submission
            assert digest_bytes(client.file(0, f"{group.submission}.verdict.safetensors")) == (
                group.verdict
            )
            assert client.file(0, f"{group.submission}.verdict.json").startswith(b"{")
        for name in ("batch.json", f"{digest('other')}.json"):
            with pytest.raises(UserError, match="the manifest names no file"):
                client.file(0, name)
        with pytest.raises(UserError, match="404, the run has 3 steps"):
            client.batch(3, 0.0)


def test_roles_without_an_islands_key_stop_the_start(tmp_path: Path) -> None:
    site = site_of(tmp_path)
    del site.islands["b"]
    site.sign_roles()
    with site.origin(), pytest.raises(UserError, match="keys of learner islands b"), site.serving():
        pass


def test_a_run_with_one_learner_has_no_such_endpoints(site: Site) -> None:
    spec = islands_spec()
    alone = spec.model_copy(update={"learner": spec.learner.model_copy(update={"islands": None})})
    write_atomic(site.run_dir / "spec.json", dump_resolved(alone))
    with site.serving():
        answer = post(site, site.islands["a"], "/v1/islands/records/0", b"", method="GET")
        assert answer.status_code == 404
        assert status(site)["islands"] is None


def test_the_client_checks_the_roles_and_the_coordinators_signature(patient: Site) -> None:
    with patient.serving():
        commit(patient, 0)
        client = island(patient, "a")
        roles = open_roles(client.roles(), root_public_key=patient.root.public_hex, run=RUN)
        assert set(roles.islands) == set(NAMES)
        patient.root = SigningKey.generate()
        with pytest.raises(UserError, match="cannot be verified"):
            island(patient, "a").record(0, 0.0)


def test_a_coordinator_that_is_away_is_named_at_the_deadline(patient: Site) -> None:
    patient.url = "http://127.0.0.1:9"
    with pytest.raises(UserError, match="cannot be reached"):
        island(patient, "a", deadline_s=0.1).record(0, 0.0)
