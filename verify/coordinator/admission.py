"""Who may register: everybody, or who was invited; the run's own keys always.

Trusted pools are never open: what comes from them is checked less (unseeded sampling, versions that
change within a rollout), so they take only keys that the operator named: the run's own, and those
with an invite for that very pool.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from runspec.common.invite import Invite, open_invite
from runspec.common.keys import SigningKey
from runspec.common.roles import Roles
from runspec.common.signed import BadSignature
from runspec.spec.role_names import worker_names
from runspec.spec.schema import RunSpec
from verify.coordinator.intake import Refusal
from verify.coordinator.state import State


class Admission:
    """Decides on a key that registers for the first time.

    Args:
        spec: the run's resolved spec.
        roles: name the keys that may invite.
        own: public keys of the run's own workers.
    """

    def __init__(self, spec: RunSpec, roles: Roles, own: Collection[str]) -> None:
        self._spec, self._roles, self._own = spec, roles, frozenset(own)
        self._trusted = frozenset(pool.name for pool in spec.samplers if pool.trust == "trusted")

    def admit(self, state: State, key: str, pool: str, used: object, now: float) -> str | None:
        """The invite by which a new key comes; None where it needs none.

        Args:
            state: of the run; counts the uses of invites.
            key: the worker's.
            pool: which it wants to serve.
            used: the invite that it sent, None without one.
            now: seconds since the epoch.

        Raises:
            Refusal: 403 with the reason.
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
