"""Decides who may register: everybody or invited workers, and the run's own always.

Work from trusted pools is checked less, so they take only keys that the operator named: the run's
own, and those with an invite for that pool.
"""

from __future__ import annotations

from collections.abc import Collection

from runspec.core.invite import Invite, open_invite
from runspec.core.roles import Roles
from runspec.core.signed import BadSignature
from runspec.core.spec.schema import RunSpec
from verify.coordinator.edge.new_keys import NewKeys
from verify.coordinator.intake import Refusal
from verify.coordinator.machine.state import State


class Admission:
    """Decides on a key that registers for the first time.

    Args:
        spec: the run's resolved spec.
        roles: keys that may sign invites.
        own: public keys of the run's own workers.
        new_keys: limits keys without an invite.
    """

    def __init__(
        self, spec: RunSpec, roles: Roles, own: Collection[str], new_keys: NewKeys
    ) -> None:
        self._spec, self._roles, self._own = spec, roles, frozenset(own)
        self._new_keys = new_keys
        self._trusted = frozenset(pool.name for pool in spec.samplers if pool.trust == "trusted")

    def is_own(self, key: str) -> bool:
        """Whether it is one of the run's own workers."""
        return key in self._own

    def admit(
        self, state: State, key: str, pool: str, used: object, now: float, *, address: str
    ) -> str | None:
        """Return the public key of the invite that admits a new key; None if it needs none.

        Args:
            state: of the run; counts the uses of invites.
            key: the worker's.
            pool: which it wants to serve.
            used: the invite that it sent, None without one.
            now: seconds since the epoch.
            address: of the client.

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
                self._new_keys.take(state, address)
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
        _check_fits(invite, pool, state.invited.get(invite.key, 0))
        if pool in self._trusted and invite.pool is None:
            raise Refusal(403, f"pool {pool!r} is trusted, and the invite does not name it")
        return invite.key


def _check_fits(invite: Invite, pool: str, used: int) -> None:
    if invite.pool is not None and invite.pool != pool:
        raise Refusal(403, f"the invite is for pool {invite.pool!r}")
    if used >= invite.uses:
        raise Refusal(403, f"the invite was used {used} times, as often as it may be")
