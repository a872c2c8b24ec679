"""How many keys may come by themselves: of one address, and of all that never did any work."""

from __future__ import annotations

import pytest

from runspec.core.invite import make_invite, use_invite
from runspec.core.keys import SigningKey
from runspec.core.roles import Roles
from tests.verify.coordinator.deployment import RUN, tiny_spec
from tests.verify.coordinator.filled import Filled, key
from verify.coordinator import admission
from verify.coordinator.admission import DAY_S, KEYS_PER_PLACE, Admission
from verify.coordinator.events import BY_OPERATOR, KeyBanned, WorkerRegistered
from verify.coordinator.intake import Refusal
from verify.coordinator.transitions import replay

COORDINATOR = SigningKey.generate()
POOL = "near"


class Gatekeeper:
    """Lets keys in at a time of our choice, as the coordinator does."""

    def __init__(self, run: Filled) -> None:
        nobody: frozenset[str] = frozenset()
        roles = Roles(RUN, 0.0, 1e12, nobody, frozenset({COORDINATOR.public_hex}), nobody)
        self.run, self.now = run, 0.0
        self.admission = Admission(tiny_spec(), roles, [key("own")], lambda: self.now)

    def come(self, name: str, place: str = "here", invite: str | None = None) -> Refusal | None:
        """Registers a key; what it is refused with, None where it is not."""
        used = None if invite is None else use_invite(invite, key(name))
        try:
            by = self.admission.admit(self.run.state, key(name), POOL, used, 1.0, place=place)
        except Refusal as refusal:
            return refusal
        self.run.record(WorkerRegistered(self.run.now, key(name), "a", by))
        self.admission.admitted(by, key(name), place)
        return None


@pytest.fixture
def gatekeeper() -> Gatekeeper:
    return Gatekeeper(Filled())


def an_invite(uses: int) -> str:
    return make_invite(RUN, pool=None, uses=uses, valid_s=1e6, coordinator=COORDINATOR)


def test_of_one_address_so_many_a_day_and_no_more_for_ever(gatekeeper: Gatekeeper) -> None:
    # given an address that brings a new key every minute, for three days
    came = []
    for minute in range(3 * 24 * 60):
        gatekeeper.now = minute * 60.0
        if gatekeeper.come(f"sybil {minute}") is None:
            came.append(gatekeeper.now)
    # then a burst and three days' worth of keys are in
    burst = KEYS_PER_PLACE.burst
    assert burst + 3 * burst - 1 <= len(came) <= burst + 3 * burst
    assert sum(at < DAY_S for at in came) <= 2 * burst
    # and others come as ever
    assert gatekeeper.come("honest", "there") is None


def test_who_is_told_when_to_come_again_is_let_in_then(gatekeeper: Gatekeeper) -> None:
    for number in range(KEYS_PER_PLACE.burst):
        assert gatekeeper.come(f"fleet {number}") is None

    refused = gatekeeper.come("one more")

    assert refused is not None and refused.status == 429
    assert refused.words.startswith("256 new keys of your address have registered, as many as may")
    assert refused.retry_after_s is not None and 300 < refused.retry_after_s < 400
    gatekeeper.now += refused.retry_after_s + 1e-3
    assert gatekeeper.come("one more") is None


def test_invited_keys_and_the_runs_own_are_under_no_limit(
    gatekeeper: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "KEYS_PER_PLACE", admission.Rate(1e-6, 1))
    monkeypatch.setattr(admission, "MAX_UNPROVEN", 1)
    assert gatekeeper.come("stranger") is None
    assert gatekeeper.come("another") is not None
    invite = an_invite(uses=3)

    assert [gatekeeper.come(name, invite=invite) for name in ("x", "y", "z")] == [None] * 3
    assert gatekeeper.come("own") is None


def test_keys_that_never_worked_are_bounded_and_work_makes_room(
    gatekeeper: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_UNPROVEN", 3)
    run = gatekeeper.run
    run.publish(0)
    # given as many keys as may be, each of an address of its own, one of which is banned
    for name in ("w", "x", "y"):
        assert gatekeeper.come(name, place=name) is None
    run.record(KeyBanned(run.now, key("y"), "by hand", BY_OPERATOR))

    # when another comes, then it is told that only an invite helps
    refused = gatekeeper.come("late", place="late")
    assert refused is not None and (refused.status, refused.retry_after_s) == (403, None)
    assert "3 keys without accepted work are registered" in refused.words
    assert "invite" in refused.words
    assert gatekeeper.come("guest", place="late", invite=an_invite(uses=1)) is None

    # and once work of one is accepted there is room for one, after a restart too
    run.work("w")
    again = Gatekeeper(run)
    run.state = replay(run.state.policy, run.events)
    assert again.come("late", place="late") is None
    assert again.come("later", place="later") is not None
