"""Who may register: everybody, or who was invited; the run's own keys always.

Trusted pools are never open: what comes from them is checked less (unseeded sampling, versions that
change within a rollout), so they take only keys that the operator named: the run's own, and those
with an invite for that very pool.

Where everybody may come, a key costs nothing, and each is remembered for as long as the run lasts:
its row in the ledger covers the nonces that are drawn after it. So keys that come without an invite
are bounded twice: those of one address over a day, and those of all that never had anything
accepted. Who is invited, and the run's own, are under neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from runspec.core.invite import Invite, open_invite
from runspec.core.keys import SigningKey
from runspec.core.roles import Roles
from runspec.core.signed import BadSignature
from runspec.core.spec.role_names import worker_names
from runspec.core.spec.schema import RunSpec
from verify.coordinator.intake import Refusal
from verify.coordinator.rates import Buckets, Rate
from verify.coordinator.state import State

DAY_S = 86400.0
KEYS_PER_PLACE = Rate(256 / DAY_S, 256)
"""New keys of one address: a large site at once, then as many a day. The limits of `rates` are of
requests, these of what stays."""
MAX_UNPROVEN = 10_000
"""Keys without an invite of which no submission was ever accepted. They are what strangers can make
the coordinator remember."""


class Admission:
    """Decides on a key that registers for the first time.

    Args:
        spec: the run's resolved spec.
        roles: name the keys that may invite.
        own: public keys of the run's own workers.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        spec: RunSpec,
        roles: Roles,
        own: Collection[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._roles, self._own = spec, roles, frozenset(own)
        self._clock, self._places = clock, Buckets()
        self._trusted = frozenset(pool.name for pool in spec.samplers if pool.trust == "trusted")

    def admit(
        self, state: State, key: str, pool: str, used: object, now: float, *, place: str
    ) -> str | None:
        """The invite by which a new key comes; None where it needs none.

        Args:
            state: of the run; counts the uses of invites.
            key: the worker's.
            pool: which it wants to serve.
            used: the invite that it sent, None without one.
            now: seconds since the epoch.
            place: which it asks from (`addresses`).

        Raises:
            Refusal: 403 with the reason, or 429.
        """
        if used is None:
            if key in self._own:
                return None
            if pool in self._trusted:
                raise Refusal(
                    403,
                    f"pool {pool!r} is trusted: it takes the run's own workers, and keys with an "
                    "invite for this pool",
                )
            if self._spec.verify.admission == "open":
                self._must_have_room(state, place)
                return None
            raise Refusal(403, "this run takes invited workers only: ask for a link with an invite")
        try:
            invite = open_invite(
                used,
                run=self._spec.name,
                worker=key,
                coordinators=self._roles.coordinator,
                now=now,
            )
        except BadSignature as error:
            raise Refusal(403, str(error)) from error
        if invite.key in state.revoked:
            raise Refusal(403, f"the invite was revoked: {state.revoked[invite.key]}")
        _must_fit(invite, pool, state.invited.get(invite.key, 0))
        if pool in self._trusted and invite.pool is None:
            raise Refusal(403, f"pool {pool!r} is trusted, and the invite does not name it")
        return invite.key

    def admitted(self, invite: str | None, key: str, place: str) -> None:
        """Counts a key, once it is in the ledger."""
        if invite is None and key not in self._own:
            self._places.take(place, KEYS_PER_PLACE, self._clock())

    def unproven(self, state: State) -> int:
        """Keys that came by themselves and never had a submission accepted."""
        own = (state.workers.get(key) for key in self._own)
        return state.unproven - sum(worker is not None and worker.unproven for worker in own)

    def _must_have_room(self, state: State, place: str) -> None:
        if self.unproven(state) >= MAX_UNPROVEN:
            raise Refusal(
                403,
                f"{MAX_UNPROVEN} keys without accepted work are registered, as many as may be: ask "
                "for a link with an invite",
            )
        wait_s = self._places.wait_s(place, KEYS_PER_PLACE, self._clock())
        if wait_s > 0.0:
            raise Refusal(
                429,
                f"{KEYS_PER_PLACE.burst} new keys of your address have registered, as many as may "
                f"in a day: come again in {wait_s:.0f} s, or ask for a link with an invite",
                retry_after_s=wait_s,
            )


def _must_fit(invite: Invite, pool: str, used: int) -> None:
    if invite.pool is not None and invite.pool != pool:
        raise Refusal(403, f"the invite is for pool {invite.pool!r}")
    if used >= invite.uses:
        raise Refusal(403, f"the invite was used {used} times, as often as it may be")


def own_workers(run_dir: Path, spec: RunSpec) -> list[str]:
    """Public keys of the workers whose keys lie in the run directory.

    Raises:
        UserError: a file there is no key.
    """
    paths = [run_dir / "keys" / f"{name}.key" for name in worker_names(spec)]
    return [SigningKey.load(path).public_hex for path in paths if path.exists()]
