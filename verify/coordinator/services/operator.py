"""Service for the operator: bans, lifted bans and revoked invites.

`runspec ban`, `runspec unban` and `runspec invite --revoke` sign with `keys/coordinator.key` of the
run directory. A person who can read that file can sign leases and batches too, so no other right is
needed. While the coordinator is down, `order_stopped` writes the same events into its ledger.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.hashing import is_digest
from runspec.core.roles import Roles
from runspec.core.spec.schema import RunSpec
from verify.coordinator.intake import Refusal
from verify.coordinator.journal import Journal
from verify.coordinator.ledger.ledger import open_ledger
from verify.coordinator.machine.events import (
    BY_OPERATOR,
    BanLifted,
    InviteRevoked,
    KeyBanned,
    RolledBack,
)
from verify.coordinator.machine.state import Policy
from verify.coordinator.machine.transitions import replay

MAX_REASON = 500
"""Largest number of characters of a reason."""


class OperatorService:
    """Bans keys, lifts bans and revokes invites; each action is an event of the ledger.

    Args:
        journal: records the events.
        roles: its keys cannot be banned.
    """

    def __init__(self, journal: Journal, roles: Roles) -> None:
        self._journal, self._roles = journal, roles

    def ban(self, body: dict[str, Any]) -> None:
        """Ban a key: its requests are refused, and its open leases end."""
        key, reason = _key_and_reason(body)
        if key in self._roles.keys:
            raise Refusal(409, "this key has a role: remove it from roles.json instead")
        if key in self._journal.state.bans:
            raise Refusal(409, f"banned already: {self._journal.state.bans[key]}")
        self._journal.record(KeyBanned(self._journal.clock(), key, reason, BY_OPERATOR))

    def unban(self, body: dict[str, Any]) -> None:
        """Lift a ban: the key may work again, in quarantine."""
        key, reason = _key_and_reason(body)
        if key not in self._journal.state.bans:
            raise Refusal(409, "this key is not banned")
        self._journal.record(BanLifted(self._journal.clock(), key, reason, BY_OPERATOR))

    def revoke(self, body: dict[str, Any]) -> None:
        """Revoke an invite: no more keys can register with it."""
        invite, reason = _key_and_reason(body)
        if invite in self._journal.state.revoked:
            raise Refusal(409, f"revoked already: {self._journal.state.revoked[invite]}")
        self._journal.record(InviteRevoked(self._journal.clock(), invite, reason, BY_OPERATOR))


def order_stopped(
    run_dir: Path, spec: RunSpec, roles: Roles, verb: str, body: dict[str, Any]
) -> None:
    """Execute an order in the ledger of a run whose coordinator is down.

    Args:
        run_dir: the run directory.
        spec: the run's resolved spec.
        roles: roles of the run.
        verb: ban, unban or revoke.
        body: has `key` and `reason`.

    Raises:
        UserError: the order is refused, or another process writes the ledger.
    """
    with closing(Journal(run_dir, Policy.of(spec), ledger=open_ledger(run_dir, spec))) as journal:
        service = OperatorService(journal, roles)
        orders = {"ban": service.ban, "unban": service.unban, "revoke": service.revoke}
        try:
            orders[verb](body)
        except Refusal as refusal:
            raise UserError(
                f"{refusal.status}, {refusal.words}",
                place=f"{verb} {body['key']}",
                remedy="see `runspec workers`",
            ) from refusal


def _key_and_reason(body: dict[str, Any]) -> tuple[str, str]:
    key, reason = body["key"], body["reason"]
    if not is_digest(key):
        raise Refusal(400, "key must be 64 hex characters")
    if not isinstance(reason, str) or not reason.strip() or len(reason) > MAX_REASON:
        raise Refusal(400, f"reason must be a text of 1 to {MAX_REASON} characters")
    return key, reason.strip()


def closed_steps(run_dir: Path, spec: RunSpec) -> int:
    """Return the number of steps that the ledger of a stopped run has closed.

    Raises:
        UserError: the ledger cannot be read, or another process writes it.
    """
    with closing(open_ledger(run_dir, spec)) as ledger:
        ledger.own()
        return replay(Policy.of(spec), ledger.events()).next_close


def record_rollback(run_dir: Path, spec: RunSpec, version: int) -> None:
    """Record in the ledger of a stopped run that it goes on from an earlier version."""
    with closing(open_ledger(run_dir, spec)) as ledger:
        ledger.append([RolledBack(time.time(), version)])
