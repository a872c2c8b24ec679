"""Who may register: the invariants that every sequence of invites, bans and rollbacks keeps."""

from __future__ import annotations

from collections import Counter

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runspec.core.hashing import hash_parts
from runspec.core.invite import invite_key, make_invite, use_invite
from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import RUN, tiny_spec
from tests.verify.coordinator.filled import Filled, policy
from tests.verify.coordinator.services import roles_of
from verify.coordinator.admission import Admission
from verify.coordinator.edge.limiter import Limiter
from verify.coordinator.edge.new_keys import NewKeys
from verify.coordinator.events import (
    BY_OPERATOR,
    BanLifted,
    CoordinatorStarted,
    InviteRevoked,
    KeyBanned,
    RolledBack,
    WorkerRegistered,
)
from verify.coordinator.intake import Refusal
from verify.coordinator.transitions import replay


def fixed(name: str) -> SigningKey:
    return SigningKey(Ed25519PrivateKey.from_private_bytes(hash_parts("key", name)))


COORDINATOR, OWN = fixed("coordinator"), fixed("own")
NAMES = [f"w{n}" for n in range(6)]
KEYS = {name: fixed(name).public_hex for name in NAMES} | {"own": OWN.public_hex}
TRUSTED, OPEN = "near", "far"


class Registering(RuleBasedStateMachine):
    """Strangers, the invited and the run's own ask for pools of which one is trusted."""

    @initialize(admission=st.sampled_from(["open", "invite"]))
    def begin(self, admission):
        spec = tiny_spec()
        near, far = spec.samplers
        pools = [near.model_copy(update={"trust": "trusted"}), far]
        verify = spec.verify.model_copy(update={"admission": admission})
        spec = spec.model_copy(update={"samplers": pools, "verify": verify})
        roles = roles_of(coordinator=[COORDINATOR.public_hex])
        self.is_open = admission == "open"
        own = [OWN.public_hex]
        self.admission = Admission(spec, roles, own, NewKeys(Limiter(), own))
        self.run = Filled(policy(groups_per_submission={TRUSTED: 2, OPEN: 2}))
        self.invites: list[tuple[str, str | None, int]] = []
        """Text, pool and uses."""
        self.came: dict[str, tuple[str, str | None]] = {}
        """By key, its pool and the key of its invite, whatever was rolled back."""
        self.uses: Counter[str] = Counter()

    @rule(pool=st.sampled_from([TRUSTED, OPEN, None]), uses=st.integers(1, 2))
    def invite(self, pool, uses):
        text = make_invite(RUN, pool=pool, uses=uses, valid_s=1e6, coordinator=COORDINATOR)
        self.invites.append((text, pool, uses))

    @rule(
        name=st.sampled_from(sorted(KEYS)),
        pool=st.sampled_from([TRUSTED, OPEN]),
        which=st.none() | st.integers(0, 5),
    )
    def register(self, name, pool, which):
        key = KEYS[name]
        if key in self.run.state.workers:
            return
        found = (
            None if which is None or not self.invites else self.invites[which % len(self.invites)]
        )
        used = None if found is None else use_invite(found[0], key)
        try:
            by = self.admission.admit(self.run.state, key, pool, used, 1000.0, address="here")
        except Refusal as refusal:
            assert refusal.status == 403
            assert not self.may(name, pool, found)
            return
        assert self.may(name, pool, found)
        assert by == (None if found is None else invite_key(found[0]))
        self.run.record(WorkerRegistered(self.run.now, key, pool, by))
        self.came[key] = (pool, by)
        if by is not None:
            self.uses[by] += 1

    def may(self, name: str, pool: str, found: tuple[str, str | None, int] | None) -> bool:
        """What was promised, in other words than the code's."""
        if found is None:
            return name == "own" or (self.is_open and pool == OPEN)
        text, named, uses = found
        fits = named == pool or (named is None and pool == OPEN)
        key = invite_key(text)
        return fits and key not in self.run.state.revoked and self.uses[key] < uses

    @precondition(lambda self: self.invites)
    @rule(data=st.data())
    def revoke(self, data):
        key = invite_key(data.draw(st.sampled_from(self.invites))[0])
        if key not in self.run.state.revoked:
            self.run.record(InviteRevoked(self.run.now, key, "published", BY_OPERATOR))

    @rule(name=st.sampled_from(sorted(KEYS)))
    def ban_or_pardon(self, name):
        if KEYS[name] in self.run.state.bans:
            self.run.record(BanLifted(self.run.now, KEYS[name], "an appeal", BY_OPERATOR))
        else:
            self.run.record(KeyBanned(self.run.now, KEYS[name], "by hand", BY_OPERATOR))

    @rule()
    def restart(self):
        """Nothing but the events is left of the process before."""
        self.run.state = replay(self.run.state.policy, self.run.events)
        self.run.record(CoordinatorStarted(self.run.now))

    @rule()
    def roll_back(self):
        """Workers are gone, and what was decided of keys and invites stays."""
        before = self.run.state
        self.run.record(RolledBack(self.run.now, 0))
        after = self.run.state
        assert not after.workers
        assert (after.bans, after.invited, after.revoked) == (
            *(before.bans, before.invited, before.revoked),
        )

    @invariant()
    def a_trusted_pool_has_none_but_who_was_named(self):
        if hasattr(self, "run"):
            pools = {invite_key(text): pool for text, pool, _ in self.invites}
            for key, worker in self.run.state.workers.items():
                named = worker.invite is not None and pools[worker.invite] == TRUSTED
                assert worker.pool == OPEN or named or key == OWN.public_hex

    @invariant()
    def no_invite_is_used_more_often_than_it_may_be(self):
        if hasattr(self, "run"):
            most = {invite_key(text): uses for text, _, uses in self.invites}
            assert dict(self.uses) == dict(self.run.state.invited)
            assert all(used <= most[key] for key, used in self.uses.items())

    def teardown(self):
        if hasattr(self, "run"):
            assert replay(self.run.state.policy, self.run.events) == self.run.state


TestRegistering = Registering.TestCase
TestRegistering.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
