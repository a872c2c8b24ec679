"""Who may come, and how often: rates, new keys, addresses, invites, bans."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from runspec.cli import app
from runspec.core.address import parse_join_link
from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.http_server import UNKNOWN, client_address
from runspec.core.process import Endpoints, save_endpoints
from runspec.core.roles import invite_key, make_invite, open_invite, use_invite
from runspec.core.schema import RunSpec
from runspec.core.signed import BadSignature, SigningKey
from runspec.local.run_dir import hold
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site, tiny_spec
from tests.verify.coordinator.filled import Filled, context_of, key, roles_of
from tests.verify.coordinator.over_http import check, granted, post, request, sample, status
from tests.waiting import eventually
from verify.audit import audit
from verify.coordinator import authentication
from verify.coordinator.authentication import AT_ONCE, RATES, Limiter, Name, Rate, networks
from verify.coordinator.handlers.registering import Registering
from verify.coordinator.machine import events
from verify.coordinator.machine.transitions import replay
from verify.coordinator.requests import Refusal

COORDINATOR = SigningKey.generate()
DAY_S = 86400.0
K = Name("key", "lease", "k")
gaps = st.lists(st.floats(0.0, 3.0), min_size=1, max_size=80)
rates = st.builds(Rate, st.floats(0.2, 5.0), st.integers(1, 6))


# -- Rates ---------------------------------------------------------------------------------------


@given(gaps, rates)
@settings(derandomize=True, max_examples=60)
def test_no_window_sees_more_than_the_rate_and_who_returns_when_told_is_served(gaps, rate):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RATES, ("key", "lease"), rate)
        limiter, calm, now, taken = Limiter(), Limiter(), 0.0, []
        for gap in gaps:
            now += gap
            told = limiter.wait_s(K, now=now)
            assert told == limiter.take(K, now=now) >= 0.0
            if told > 0.0:
                now += told + 1e-6
                assert limiter.take(K, now=now) == 0.0
            taken.append(now)
        step = (1.0 + 1e-6) / rate.per_s
        assert all(calm.take(K, now=n * step) == 0.0 for n in range(20))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            window = taken[last] - taken[first]
            assert last - first + 1 <= rate.burst + rate.per_s * window + 1e-6


@pytest.mark.parametrize(("scope", "times"), [("address", 3), ("key", 1), ("all", 1)])
def test_a_crowd_raises_the_limits_of_one_address_alone(scope: Any, times: int):
    limiter = Limiter(3.0)
    for kind in (kind for of, kind in RATES if of == scope):
        name, burst = Name(scope, kind, "crowded"), RATES[scope, kind].burst * times
        assert [limiter.take(name, now=0.0) for _ in range(burst)] == [0.0] * burst
        wait_s = limiter.take(name, now=0.0)
        assert wait_s == pytest.approx(1.0 / (RATES[scope, kind].per_s * times))
    for kind in (kind for of, kind in AT_ONCE if of == scope):
        with ExitStack() as held:
            most = AT_ONCE[scope, kind] * times
            allowed = [
                held.enter_context(limiter.at_once(Name(scope, kind))) for _ in range(most + 1)
            ]
        assert allowed == [*[True] * most, False]


@pytest.mark.parametrize(("scope", "kind"), AT_ONCE)
def test_only_so_many_of_a_name_go_on_at_once(scope: Any, kind: Any):
    limiter, most = Limiter(), AT_ONCE[scope, kind]
    with ExitStack() as held:
        mine = [held.enter_context(limiter.at_once(Name(scope, kind))) for _ in range(most)]
        assert all(mine)
        assert not held.enter_context(limiter.at_once(Name(scope, kind)))
        assert held.enter_context(limiter.at_once(Name(scope, kind, "other")))
    assert not limiter._at_once


@pytest.mark.parametrize(
    ("kind", "usual"), [("unbelieved", 401), ("public", 200), ("stranger", 403)]
)
def test_what_no_worker_signed_is_bounded_by_address(tmp_path: Path, monkeypatch, kind, usual):
    monkeypatch.setitem(RATES, ("address", kind), Rate(1e-3, 2))
    site = site_of(tmp_path, proxies=["127.0.0.1"])
    ask = canonical_json({"wait": 0, "holding": []})

    def asked(address: str, key: SigningKey | None = None) -> httpx.Response:
        headers = {"X-Forwarded-For": address}
        if kind == "stranger":
            key = key or SigningKey.generate()
            return post(site, key, "/v1/leases", ask, headers=headers)
        path, method = ("/v1/leases", "POST") if kind == "unbelieved" else ("/v1/status", "GET")
        return request(site, method, path, headers=headers)

    with site.origin(), site.serving():
        worker, client = site.worker()
        granted(site, client)
        answers = [asked("203.0.113.9") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [usual, usual, 429]
        assert 1 <= int(answers[-1].headers["Retry-After"]) <= 1000
        assert asked("203.0.113.10").status_code == usual
        assert kind != "stranger" or asked("203.0.113.9", worker).status_code == 200


def test_a_key_has_a_rate_and_one_with_a_role_has_none(site: Site, monkeypatch):
    monkeypatch.setitem(RATES, ("key", "heartbeat"), Rate(1e-3, 1))
    with site.serving():
        worker, _ = site.worker()
        for who, codes in ((site.validator, [200] * 3), (worker, [200, 429, 429])):
            beats = [post(site, who, "/v1/heartbeat", b'{"state":{}}') for _ in codes]
            assert [answer.status_code for answer in beats] == codes


def test_only_so_many_requests_of_a_key_wait_for_a_lease(site: Site, monkeypatch):
    monkeypatch.setitem(AT_ONCE, ("key", "poll"), 1)
    monkeypatch.setitem(RATES, ("key", "lease"), Rate(1e6, 10**6))
    (site.store / RUN / "latest.json").unlink()  # nothing can be leased
    with site.serving(), ThreadPoolExecutor(1) as pool:
        worker, client = site.worker()
        waiting = pool.submit(granted, site, client)

        def one_too_many() -> bool:
            answer = post(site, worker, "/v1/leases", b'{"holding":[],"wait":0}')
            return (answer.status_code, "waiting for a lease already" in answer.text) == (429, True)

        eventually(one_too_many, "a request is waiting")
        # when there is something to lease, then it is told
        site.publish(0)
        assert waiting.result(DEADLINE_S)


PROXIES = networks(["10.0.0.7", "10.1.0.0/24", "fd00::/8"])
FORGED = "6.6.6.6"


@pytest.mark.parametrize(
    ("remote", "forwarded", "address"),
    [
        ("203.0.113.9", [], "203.0.113.9"),
        ("2001:db8:1:2:3:4:5:6", [], "2001:db8:1:2::/64"),
        ("::ffff:203.0.113.9", [], "203.0.113.9"),
        (None, [], UNKNOWN),
        # a client that is no proxy is not believed
        ("203.0.113.9", [FORGED], "203.0.113.9"),
        # a proxy wrote the last entry; anybody may have written those before it
        ("10.0.0.7", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.7", [f"{FORGED}, 203.0.113.9"], "203.0.113.9"),
        # a proxy behind another, of either family, with ports or without
        ("10.0.0.7", [f"{FORGED}, 203.0.113.9:5555, 10.1.0.3, [fd00::2]:80"], "203.0.113.9"),
        ("fd00::1", ["2001:db8:1:2::1"], "2001:db8:1:2::/64"),
        # a proxy that names no address counts itself
        ("10.0.0.7", [], "10.0.0.7"),
        ("10.0.0.7", [f"{FORGED},"], "10.0.0.7"),
        # and of a header without end only the last hops are read
        ("10.0.0.7", [f"{FORGED}," * 5000 + "10.1.0.3," * 20 + "10.0.0.7"], "10.1.0.3"),
    ],
)
def test_only_listed_proxies_are_believed(remote, forwarded, address):
    assert client_address(remote, forwarded, PROXIES) == address


# -- New keys and invites ------------------------------------------------------------------------


class Keys:
    """Registers keys at a time of the test's choice, as the coordinator does."""

    def __init__(self, run: Filled, **verify: object) -> None:
        self.run, self.now = run, 0.0
        values = tiny_spec(verify=verify).model_dump(mode="json", by_alias=True)
        values["samplers"][1] |= {"trust": "trusted", "in_flight_updates": True}
        roles = roles_of(coordinator=[COORDINATOR.public_hex])
        context = context_of(run, RunSpec.model_validate(values), roles=roles)  # type: ignore[arg-type]
        self.registering = Registering(context, [key("own")], Limiter(), lambda: self.now)

    def come(
        self, name: str, address: str = "here", invite: str | None = None, **changes: Any
    ) -> Refusal | None:
        """Registers a key; the refusal, if it is refused."""
        used = None if invite is None else use_invite(invite, key(name))
        try:
            how = {"pool": "near", "now": 1.0, "address": address, **changes}
            by = self.registering.admit(key(name), used=used, **how)
        except Refusal as refusal:
            return refusal
        event = events.WorkerRegistered(self.run.now, key(name), "a", by, name == "own")
        self.run.record(event)
        return None


def invite(*, run: str = RUN, by: SigningKey = COORDINATOR, **changes: Any) -> str:
    settings = {"pool": None, "uses": 1, "valid_s": DAY_S, **changes}
    return make_invite(run, coordinator=by, **settings)


def test_of_one_address_so_many_a_day_and_no_more_for_ever() -> None:
    keys = Keys(Filled())
    came = []
    for minute in range(0, 3 * 24 * 60, 2):  # for three days
        keys.now = minute * 60.0
        refused = keys.come(f"sybil {minute}")
        if refused is None:
            came.append(keys.now)
        else:
            assert (refused.status, "256 new keys" in refused.words) == (429, True)
            assert refused.retry_after_s is not None and 0 < refused.retry_after_s < DAY_S / 256
    # then a burst and three days' worth of keys are in, and others come as ever
    assert 4 * 256 - 2 <= len(came) <= 4 * 256
    assert sum(at < DAY_S for at in came) <= 2 * 256
    assert keys.come("honest", "there") is None


def test_keys_that_never_worked_are_bounded_and_work_makes_room(monkeypatch) -> None:
    monkeypatch.setattr(authentication, "MAX_UNPROVEN", 3)
    run = Filled()
    keys = Keys(run)
    run.publish(0)
    # given as many keys as may be, each of an address of its own, one of which is banned
    for name in ("w", "x", "y"):
        assert keys.come(name, address=name) is None
    run.record(events.KeyBanned(run.now, key("y"), "by hand", events.BY_OPERATOR))
    # when another comes, then it is told that only an invite helps
    refused = keys.come("late", address="late")
    assert refused is not None and (refused.status, refused.retry_after_s) == (403, None)
    assert "3 keys without accepted work are registered" in refused.words
    assert keys.come("guest", address="late", invite=invite()) is None
    assert keys.come("own", address="late") is None
    # and once work of one is accepted there is room for one, after a restart too
    run.work("w")
    again = Keys(run)
    run.state = replay(run.state.policy, run.events)
    assert again.come("late", address="late") is None
    assert again.come("later", address="later") is not None


def test_who_was_not_invited_is_refused_by_name_of_what_is_missing() -> None:
    run, used, revoked = Filled(), invite(), invite()
    keys = Keys(run, admission="invite")
    assert keys.come("own") is keys.come("guest", invite=used) is None
    run.record(events.InviteRevoked(run.now, invite_key(revoked), "published", "operator"))
    for comes, words in (
        ({}, "this run takes invited workers only"),
        ({"invite": used}, "the invite was used 1 times, as often as it may be"),
        ({"invite": revoked}, "the invite was revoked: published"),
        ({"invite": invite(pool="far")}, "the invite is for pool 'far'"),
        ({"invite": invite(), "now": 1e12}, "invite: expired"),
        ({"invite": invite(run="other")}, "invite: of run 'other', not 'tiny'"),
        ({"invite": invite(by=SigningKey.generate())}, "may not sign it"),
        ({"pool": "far"}, "pool 'far' is trusted: it takes the run's own workers"),
        ({"pool": "far", "invite": invite()}, "is trusted, and the invite does not name it"),
    ):
        refused = keys.come("late", **comes)
        assert refused is not None and (refused.status, words in refused.words) == (403, True)
    assert keys.come("late", pool="far", invite=invite(pool="far")) is None


def test_what_one_worker_sent_is_of_no_use_to_another() -> None:
    one, other = SigningKey.generate(), SigningKey.generate()
    used = use_invite(invite(), one.public_hex)
    own = use_invite(invite().rpartition(".")[0] + "." + other.secret_hex, other.public_hex)
    names = {"run": RUN, "coordinators": {COORDINATOR.public_hex}, "now": 0.0}
    assert open_invite(used, worker=one.public_hex, **names)
    for sent, words in ((used, "the proof is for another key"), (own, "may not sign it")):
        with pytest.raises(BadSignature, match=words):
            open_invite(sent, worker=other.public_hex, **names)


def told(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def site_of(folder: Path, **verify: object) -> Site:
    site = Site(folder, tiny_spec(verify=verify))
    site.publish(0)
    return site


def test_a_revoked_invite_admits_nobody_and_who_came_with_it_stays(tmp_path: Path):
    site = site_of(tmp_path, admission="invite")
    SigningKey.generate().save(site.run_dir / "keys" / "root.key")
    first, late = SigningKey.generate(), SigningKey.generate()
    command = ("invite", site.run_dir)
    with site.origin(), hold(site.run_dir):
        with site.serving():
            save_endpoints(site.run_dir, Endpoints(site.url, site.weights, {}))
            made = (*command, "--uses", "3", "--pool", "near", "--expires", "2h")
            links = [told(*made).output.strip() for _ in range(2)]
            assert parse_join_link(links[0]).coordinator == site.url
            invites = [parse_join_link(link).invite for link in links]
            site.client(first).register("near", {}, invite=invites[0])
            with pytest.raises(UserError, match="copy the whole link"):
                site.client(late).register("near", {}, invite=str(invites[0])[:-1])
            # when invites are revoked, by link and by the beginning of the key
            why = ("--reason", "it was published")
            revoked = told(*command, "--revoke", links[0], *why)
            assert "no more keys come with it" in revoked.output
            start = invite_key(invites[1] or "")[:12]
            assert told(*command, "--revoke", start).exit_code == 0
            again = told(*command, "--revoke", links[0])
            assert "409, revoked already: it was published" in str(again.exception)
            body = canonical_json({"key": first.public_hex, "reason": "x"})
            assert post(site, first, "/v1/operator/revoke", body).status_code == 403
            for options, words in (
                (("--pool", "none"), "no sampler pool 'none'"),
                (("--expires", "soon"), "--expires"),
                (("--revoke", "abc"), "0 known keys begin with it"),
                (("--revoke", "http://here:1/#run=x&root=" + "ab" * 32), "invite: "),
            ):
                result = told(*command, *options)
                assert result.exit_code != 0 and words in f"{result.exception} {result.output}"
        # then, after a restart too, nobody comes with them, and who came before works on
        with site.serving():
            save_endpoints(site.run_dir, Endpoints(site.url, site.weights, {}))
            for text, words in zip(invites, ("it was published", "the link is no l"), strict=True):
                with pytest.raises(UserError, match=f"403, the invite was revoked: {words}"):
                    site.client(late).register("near", {}, invite=text)
            site.client(first).register("near", {})
            granted(site, site.client(first))
            rows = json.loads(told(*command, "--list", "--json").stdout)
            assert [(row["uses"], row["used"], row["revoked"]) for row in rows] == [
                (3, 1, "it was published"),
                (3, 0, "the link is no longer valid"),
            ]
            assert "1 of 3" in told(*command, "--list").output
    assert audit(site.run_dir, root_key=site.root.public_hex).findings == []


# -- Bans ----------------------------------------------------------------------------------------


def test_a_banned_worker_learns_why_and_is_refused_until_its_ban_is_lifted(site, monkeypatch):
    monkeypatch.setattr("verify.coordinator.machine.consequences.BAN_AFTER", 2)
    with site.serving():
        # given a worker whose work is rejected again and again
        key, worker = site.worker()
        for _ in range(2):
            last, lease = sample(site, key, worker)
            check(site, site.client(site.validator), accepted=False)
    with site.serving():  # and a restart changes nothing
        # then it is told check, number, limit, submission, and whom to ask
        with pytest.raises(UserError, match="403, this key is banned: 2 submissions") as refused:
            site.client(key).lease(0.0)
        for words in (
            f"0.25 > 0.1 (submission {last[:16]} of step {lease.step})",
            f"To appeal, send this message and the key {key.public_hex} to whoever invited you",
        ):
            assert words in str(refused.value)
        (mine,) = status(site)["workers"]
        assert mine["standing"] == "banned" and mine["reason"] in str(refused.value)
        # and only the coordinator's own key lifts a ban, or bans whoever can be banned
        for what, whom, why, by, code in (
            ("unban", key.public_hex, "x", key, 403),
            ("unban", key.public_hex, "the wrong key", site.coordinator, 200),
            ("unban", key.public_hex, "x", site.coordinator, 409),
            ("ban", key.public_hex, "x", site.validator, 403),
            ("ban", "abc", "x", site.coordinator, 400),
            ("ban", "ab" * 32, " ", site.coordinator, 400),
            ("ban", "ab" * 32, "x" * 501, site.coordinator, 400),
            ("ban", site.validator.public_hex, "x", site.coordinator, 409),
            ("ban", "ab" * 32, "x", site.coordinator, 200),
            ("ban", "ab" * 32, "x", site.coordinator, 409),
        ):
            body = canonical_json({"key": whom, "reason": why})
            found = post(site, by, f"/v1/operator/{what}", body).status_code
            assert found == code, (what, whom, why)
        granted(site, site.client(key))
        (mine,) = status(site)["workers"]
        assert (mine["standing"], mine["prefill_share"]) == ("quarantined", 1.0)
        assert mine["reason"] == "its ban was lifted: the wrong key"
        assert status(site)["crowd"]["banned"] == 1
