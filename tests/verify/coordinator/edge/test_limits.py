"""The limits of requests and new keys: token buckets, counts at once, addresses of clients."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runspec.core.invite import make_invite, use_invite
from runspec.core.keys import SigningKey
from runspec.core.spec.schema import Verify
from tests.verify.coordinator.deployment import RUN, tiny_spec
from tests.verify.coordinator.filled import Filled, key
from tests.verify.coordinator.in_process import roles_of
from verify.coordinator.edge import limits
from verify.coordinator.edge.authentication import UNKNOWN, client_address, networks
from verify.coordinator.edge.limits import AT_ONCE, RATES, Limiter, Name, NewKeys, Rate
from verify.coordinator.intake import Refusal
from verify.coordinator.machine.events import BY_OPERATOR, KeyBanned, WorkerRegistered
from verify.coordinator.machine.transitions import replay
from verify.coordinator.services.leasing import Admission

COORDINATOR = SigningKey.generate()
DAY_S = 86400.0
KEYS_A_DAY = 256
K = Name("key", "lease", "k")
gaps = st.lists(st.floats(0.0, 3.0), min_size=1, max_size=80)
rates = st.builds(Rate, st.floats(0.2, 5.0), st.integers(1, 6))


class TestBuckets:
    @given(gaps, rates)
    def test_no_window_sees_more_than_the_rate_and_who_returns_when_told_is_served(
        self, gaps, rate
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(RATES, ("key", "lease"), rate)
            limits, calm, now, taken = Limiter(), Limiter(), 0.0, []
            for gap in gaps:
                now += gap
                told = limits.wait_s(K, now=now)
                assert told == limits.take(K, now=now) >= 0.0
                if told > 0.0:
                    now += told + 1e-6
                    assert limits.take(K, now=now) == 0.0
                taken.append(now)
            step = (1.0 + 1e-6) / rate.per_s
            assert all(calm.take(K, now=n * step) == 0.0 for n in range(20))
        for first in range(len(taken)):
            for last in range(first, len(taken)):
                window = taken[last] - taken[first]
                assert last - first + 1 <= rate.burst + rate.per_s * window + 1e-6

    @given(st.lists(st.tuples(st.integers(0, 30), st.floats(0.0, 2.0)), max_size=120))
    def test_the_memory_is_bounded_and_never_kinder_than_an_unbounded_one(self, requests):
        bounded, free, now = Limiter(max_buckets=5), Limiter(), 0.0
        for client, gap in requests:
            now += gap
            name = Name("address", "registration", str(client))
            refused = bounded.take(name, now=now) > 0.0
            assert len(bounded._full_at["address"]) <= 5
            if not refused:
                assert free.take(name, now=now) == 0.0

    @pytest.mark.parametrize("kind", ["registration", "stranger", "public"])
    def test_a_flood_from_one_address_takes_nothing_from_the_others(self, kind):
        limits, total = Limiter(), RATES["all", kind].burst

        def admitted(address: str, tries: int) -> int:
            names = Name("address", kind, address), Name("all", kind)
            return sum(limits.take(*names, now=0.0) == 0.0 for _ in range(tries))

        assert admitted("flood", 10 * total) == RATES["address", kind].burst
        # and many addresses meet a limit of all, which registered workers are not under
        others = sum(admitted(f"address {n}", 1) for n in range(total))
        assert others == total - RATES["address", kind].burst
        assert limits.take(K, now=0.0) == 0.0

    @pytest.mark.parametrize("scope", ["key", "address", "all"])
    def test_only_so_many_of_a_name_go_on_at_once(self, scope: str):
        for kind in (kind for of, kind in AT_ONCE if of == scope):
            limits, most = Limiter(), AT_ONCE[scope, kind]
            with ExitStack() as held:
                mine = [held.enter_context(limits.at_once(Name(scope, kind))) for _ in range(most)]
                assert all(mine)
                assert not held.enter_context(limits.at_once(Name(scope, kind)))
                assert held.enter_context(limits.at_once(Name(scope, kind, "other")))
            assert not limits._at_once


class Registering:
    """Registers keys at a time of the test's choice, as the coordinator does."""

    def __init__(self, run: Filled) -> None:
        self.run, self.now = run, 0.0
        roles = roles_of(coordinator=[COORDINATOR.public_hex])
        limit = NewKeys(Limiter(), clock=lambda: self.now)
        self.admission = Admission(tiny_spec(), roles, [key("own")], limit)

    def come(self, name: str, address: str = "here", invite: str | None = None) -> Refusal | None:
        """Registers a key; the refusal, if it is refused."""
        used = None if invite is None else use_invite(invite, key(name))
        try:
            by = self.admission.admit(self.run.state, key(name), "near", used, 1.0, address=address)
        except Refusal as refusal:
            return refusal
        self.run.record(WorkerRegistered(self.run.now, key(name), "a", by, name == "own"))
        return None


class TestNewKeys:
    def test_of_one_address_so_many_a_day_and_no_more_for_ever(self) -> None:
        keys = Registering(Filled())
        # given an address that brings a new key every four minutes, for three days
        came = []
        for minute in range(0, 3 * 24 * 60, 2):
            keys.now = minute * 60.0
            refused = keys.come(f"sybil {minute}")
            if refused is None:
                came.append(keys.now)
            else:
                assert refused.status == 429 and refused.retry_after_s is not None
                assert refused.words.startswith(f"{KEYS_A_DAY} new keys of your address have regis")
                assert 0 < refused.retry_after_s < DAY_S / KEYS_A_DAY
        # then a burst and three days' worth of keys are in
        assert 4 * KEYS_A_DAY - 2 <= len(came) <= 4 * KEYS_A_DAY
        assert sum(at < DAY_S for at in came) <= 2 * KEYS_A_DAY
        # and others come as ever
        assert keys.come("honest", "there") is None

    def test_keys_that_never_worked_are_bounded_and_work_makes_room(self, monkeypatch) -> None:
        monkeypatch.setattr(limits, "MAX_UNPROVEN", 3)
        run = Filled()
        keys = Registering(run)
        run.publish(0)
        # given as many keys as may be, each of an address of its own, one of which is banned
        for name in ("w", "x", "y"):
            assert keys.come(name, address=name) is None
        run.record(KeyBanned(run.now, key("y"), "by hand", BY_OPERATOR))
        # when another comes, then it is told that only an invite helps
        refused = keys.come("late", address="late")
        assert refused is not None and (refused.status, refused.retry_after_s) == (403, None)
        assert "3 keys without accepted work are registered" in refused.words
        invite = make_invite(RUN, pool=None, uses=1, valid_s=1e6, coordinator=COORDINATOR)
        assert keys.come("guest", address="late", invite=invite) is None
        assert keys.come("own", address="late") is None
        # and once work of one is accepted there is room for one, after a restart too
        run.work("w")
        again = Registering(run)
        run.state = replay(run.state.policy, run.events)
        assert again.come("late", address="late") is None
        assert again.come("later", address="later") is not None


PROXIES = networks(["10.0.0.7", "10.1.0.0/24", "fd00::/8"])
FORGED = "6.6.6.6"


class TestAddresses:
    @pytest.mark.parametrize(
        ("remote", "forwarded", "address"),
        [
            ("203.0.113.9", [], "203.0.113.9"),
            ("2001:db8:1:2:3:4:5:6", [], "2001:db8:1:2::/64"),
            ("::ffff:203.0.113.9", [], "203.0.113.9"),
            ("fe80::1%eth0", [], "fe80::/64"),
            (None, [], UNKNOWN),
            ("/run/socket", [], UNKNOWN),
            # a client that is no proxy is not believed
            ("203.0.113.9", [FORGED], "203.0.113.9"),
            # a proxy wrote the last entry; anybody may have written those before it
            ("10.0.0.7", ["203.0.113.9"], "203.0.113.9"),
            ("10.0.0.7", [f"{FORGED}, 203.0.113.9"], "203.0.113.9"),
            ("10.0.0.7", [FORGED, "203.0.113.9"], "203.0.113.9"),
            # a proxy behind another, of either family, with ports or without
            ("10.0.0.7", [f"{FORGED}, 203.0.113.9:5555, 10.1.0.3, [fd00::2]:80"], "203.0.113.9"),
            ("fd00::1", ["2001:db8:1:2::1"], "2001:db8:1:2::/64"),
            # a proxy that names no address counts itself
            ("10.0.0.7", [], "10.0.0.7"),
            ("10.0.0.7", ["unknown"], "10.0.0.7"),
            ("10.0.0.7", [f"{FORGED},"], "10.0.0.7"),
            ("10.0.0.7", ["10.1.0.3"], "10.1.0.3"),
            # and of a header without end only the last hops are read
            ("10.0.0.7", [f"{FORGED}," * 5000 + "10.1.0.3," * 20 + "10.0.0.7"], "10.1.0.3"),
        ],
    )
    def test_only_listed_proxies_are_believed(self, remote, forwarded, address):
        assert client_address(remote, forwarded, PROXIES) == address

    @given(
        st.text(max_size=60), st.lists(st.text(",.:[]%0123456789abcdef ", max_size=80), max_size=4)
    )
    def test_whatever_is_sent_is_some_address(self, remote, forwarded):
        assert 0 < len(client_address(remote, forwarded, PROXIES)) < 50
        assert len(client_address("10.0.0.7", forwarded, PROXIES)) < 50

    @pytest.mark.parametrize("wrong", ["10.0.0.7/8", "10.0.0", "proxy.example.org", "fd00::/200"])
    def test_a_range_that_is_none_is_refused_in_the_spec(self, wrong):
        Verify.model_validate({"proxies": ["10.0.0.0/8", "fd00::/8", "::1"]})
        with pytest.raises(ValidationError):
            Verify.model_validate({"proxies": [wrong]})
