"""Service for workers: decides who may register, grants leases, receives submissions.

Work from trusted pools is checked less. So they take only keys that the operator named: the run's
own keys, and keys with an invite for that pool.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from runspec.core.files import sync_folder
from runspec.core.keys import SigningKey
from runspec.core.roles import Roles, open_invite
from runspec.core.run_files import SubmissionFiles, submission_files
from runspec.core.signed import BadSignature
from runspec.core.spec.schema import RunSpec
from verify.coordinator.edge.backlog import Backlog
from verify.coordinator.edge.limits import NewKeys
from verify.coordinator.intake import Refusal, received, refusing, to_the_end, write_small
from verify.coordinator.journal import Finished, Journal
from verify.coordinator.machine import events, filling
from verify.coordinator.machine.state import LeaseRecord, State
from verify.formats.lease import Lease, lease_digest, sign_lease
from verify.formats.submission import SubmissionEnvelope, max_submission_bytes

_log = logging.getLogger(__name__)


class Admission:
    """Decides whether a key may register for the first time.

    Args:
        spec: the run's resolved spec.
        roles: its coordinators may sign invites.
        own: public keys of the run's own workers.
        new_keys: limits keys without an invite.
    """

    def __init__(
        self, spec: RunSpec, roles: Roles, own: Collection[str], new_keys: NewKeys
    ) -> None:
        self._spec, self._roles, self._new_keys = spec, roles, new_keys
        self.own = frozenset(own)
        self._trusted = frozenset(pool.name for pool in spec.samplers if pool.trust == "trusted")

    def admit(
        self, state: State, key: str, pool: str, used: object, now: float, *, address: str
    ) -> str | None:
        """Return the public key of the invite that admits a new key; None if it needs none.

        Args:
            state: state of the run; it counts the uses of invites.
            key: public key of the worker.
            pool: pool that it wants to serve.
            used: invite that it sent; None without one.
            now: seconds since the epoch.
            address: address of the client.

        Raises:
            Refusal: 403 with the reason, or 429.
        """
        if used is None:
            if key in self.own:
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
        with refusing(403, BadSignature):
            invite = open_invite(
                used,
                run=self._spec.name,
                worker=key,
                coordinators=self._roles.coordinator,
                now=now,
            )
        if invite.key in state.revoked:
            raise Refusal(403, f"the invite was revoked: {state.revoked[invite.key]}")
        if invite.pool is not None and invite.pool != pool:
            raise Refusal(403, f"the invite is for pool {invite.pool!r}")
        if (times := state.invited.get(invite.key, 0)) >= invite.uses:
            raise Refusal(403, f"the invite was used {times} times, as often as it may be")
        if pool in self._trusted and invite.pool is None:
            raise Refusal(403, f"pool {pool!r} is trusted, and the invite does not name it")
        return invite.key


@dataclass(eq=False)
class _Question:
    """A waiting request for a lease; a key may have several."""

    key: str
    holding: Collection[str]
    answer: LeaseRecord | None = None


class Leasing:
    """Tells workers what to sample and receives their submissions.

    Args:
        journal: records the events.
        spec: the run's resolved spec.
        key: signs the leases.
        roles: its keys cannot be workers'.
        admission: decides who may register.
        backlog: limits the waiting submissions.
    """

    def __init__(
        self,
        journal: Journal,
        spec: RunSpec,
        key: SigningKey,
        roles: Roles,
        admission: Admission,
        backlog: Backlog,
    ) -> None:
        self._journal, self._spec, self._key = journal, spec, key
        self._admission, self._backlog = admission, backlog
        self._staff = roles.keys
        self._pools = {pool.name: pool for pool in spec.samplers}
        self._waiting: list[_Question] = []
        """Questions that wait for a lease."""
        self._settled: State | None = None
        """State in which there was no work for the waiting questions."""
        self._overdue_at: float | None = None
        """Time at which there may be work although the state does not change."""

    def register(self, key: str, pool: str, invite: object = None, *, address: str) -> None:
        """Register a key as a worker of a pool. A second call changes nothing and needs no invite.

        Args:
            key: public key of the worker.
            pool: name of the pool.
            invite: invite that the worker sent, unchecked.
            address: address of the client.

        Raises:
            Refusal: there is no such pool; or the key has a role, belongs to another pool, is not
                invited, or is one too many.
        """
        self._require_pools()
        if pool not in self._pools:
            raise Refusal(404, f"the run has no pool {pool!r}; it has {', '.join(self._pools)}")
        if key in self._staff:
            raise Refusal(403, "a key with a role cannot be a worker's")
        known = self._journal.state.workers.get(key)
        if known is not None and known.pool != pool:
            raise Refusal(409, f"this key is a worker of pool {known.pool!r}")
        if known is None:
            now = self._journal.clock()
            state = self._journal.state
            by = self._admission.admit(state, key, pool, invite, now, address=address)
            own = by is None and key in self._admission.own
            self._journal.record(events.WorkerRegistered(now, key, pool, by, own))
            _log.info("worker %s of pool %s registered", key[:16], pool)

    async def lease(self, key: str, holding: Collection[str], wait_s: float) -> bytes | None:
        """Return a signed lease for a worker; None if there was none within `wait_s` seconds.

        Args:
            key: public key of the worker.
            holding: digests of the leases that its process works on.
            wait_s: how long to wait for work.

        Raises:
            Refusal: the key is not registered.
            Finished: the run is finished.
        """
        self._require_pools()
        if key not in self._journal.state.workers:
            raise Refusal(403, "this key is not registered: POST /v1/workers first")
        deadline = self._journal.clock() + wait_s
        question = _Question(key, holding)
        self._waiting.append(question)
        new = [question]
        try:
            while True:
                if self._journal.state.finished:
                    raise Finished
                self._answer_in_turn(new)
                new = []
                if question.answer is not None:
                    return question.answer.document.encode()
                if not await self._journal.change(deadline, due=self._overdue_at):
                    return None
        finally:
            self._waiting.remove(question)

    def _answer_in_turn(self, new: Sequence[_Question]) -> None:
        """Answer the open questions for which there is work.

        All waiting requests call this after an event; the first call answers all of them.

        Args:
            new: the newest question. If nothing has changed, only it needs an answer.
        """
        due = self._overdue_at is not None and self._journal.clock() >= self._overdue_at
        settled = self._settled is self._journal.state and not due
        asking = new if settled else self._waiting
        while asking:
            state, now = self._journal.state, self._journal.clock()
            hopeful = set(filling.hopeful(state, {each.key for each in asking}, now))
            for question in sorted(asking, key=lambda each: filling.turn(state, each.key)):
                if question.answer is None and question.key in hopeful:
                    question.answer = self._lease_now(question.key, question.holding)
            keys = [question.key for question in self._waiting]
            self._overdue_at = filling.next_overdue(self._journal.state, keys, now)
            self._settled = state
            asking = self._waiting if state is not self._journal.state else ()

    def _lease_now(self, key: str, holding: Collection[str]) -> LeaseRecord | None:
        while True:
            now = self._journal.clock()
            decision = filling.decide_lease(self._journal.state, key, now, holding=holding)
            match decision:
                case LeaseRecord():
                    return decision
                case None:
                    return None
                case _ if self._backlog.full() is not None:
                    return None  # the status reports why
                case filling.NonceNeeded(step):
                    nonce = secrets.token_hex(32)
                    self._journal.record(
                        events.NonceDrawn(now, step, nonce, len(self._journal.state.workers))
                    )
                case events.LeaseOverdue():
                    lease = self._journal.state.leases[decision.lease].lease
                    self._journal.record(decision)
                    _log.warning(
                        "worker %s is silent: others are leased the groups of its lease %d of "
                        "step %d too",
                        *(lease.worker[:16], lease.index, lease.step),
                    )
                case Lease():
                    document = sign_lease(decision, self._key)
                    self._journal.record(
                        events.LeaseGranted(
                            now, decision, lease_digest(document), document.decode()
                        )
                    )

    def release(self, key: str, digests: Collection[str]) -> None:
        """Take back leases that their holder will not answer; others may be leased the groups.

        Leases that are not open, not the caller's, or being answered now do not change.

        Args:
            key: public key of the worker.
            digests: digests of the leases.
        """
        for digest in digests:
            record = self._journal.state.leases.get(digest)
            held = record is not None and record.lease.worker == key and record.status == "open"
            if held and digest not in self._backlog.uploading:
                self._journal.record(events.LeaseReleased(self._journal.clock(), digest))

    async def submit(
        self, envelope: SubmissionEnvelope, signed: bytes, chunks: AsyncIterator[bytes]
    ) -> None:
        """Receive a submission; the same bytes again change nothing.

        If too many submissions wait for a verdict, a refusal names the time of a retry before the
        body is read, and the lease lasts until then.

        Args:
            envelope: statement of the submission; the caller's signature is checked.
            signed: bytes of the envelope.
            chunks: the body.
        """
        self._require_pools()
        record, now = self._lease_of(envelope), self._journal.clock()
        if record.submission == envelope.digest:
            return
        self._must_be_open(record, envelope, now)
        if any(r.submission == envelope.digest for r in self._journal.state.leases.values()):
            raise Refusal(409, "the same bytes were submitted for another lease")
        limit = max_submission_bytes(self._spec, self._pools[record.lease.pool])
        if envelope.bytes > limit:
            raise Refusal(413, f"{envelope.bytes} bytes, more than the {limit} allowed")
        with self._backlog.reserve(record, envelope, now):
            await self._take_in(envelope, signed, chunks)

    def _require_pools(self) -> None:
        if self._spec.supervised is not None:
            kind = self._spec.algorithm.kind
            raise Refusal(404, f"a run of algorithm.kind {kind} trains on documents: no workers")

    async def _take_in(
        self, envelope: SubmissionEnvelope, signed: bytes, chunks: AsyncIterator[bytes]
    ) -> None:
        files = submission_files(self._journal.run_dir, envelope.step, envelope.digest)
        async with received(
            chunks, files.submission.parent, digest=envelope.digest, size=envelope.bytes
        ) as body:
            with self._journal.recording(files.submission, files.submission_envelope):
                await to_the_end(partial(_place, body, files, signed))
                now = self._journal.clock()
                self._must_be_open(self._lease_of(envelope), envelope, now)
                self._journal.record(
                    events.SubmissionReceived(now, envelope.lease, envelope.digest, envelope.bytes)
                )

    def _lease_of(self, envelope: SubmissionEnvelope) -> LeaseRecord:
        record = self._journal.state.leases.get(envelope.lease)
        if record is None:
            raise Refusal(409, "no such lease, or its step is long closed")
        lease = record.lease
        if lease.worker != envelope.worker:
            raise Refusal(403, "the lease is another worker's")
        if (lease.run, lease.step, lease.index) != (envelope.run, envelope.step, envelope.index):
            raise Refusal(400, "run, step or index are not the lease's")
        return record

    def _must_be_open(self, record: LeaseRecord, envelope: SubmissionEnvelope, now: float) -> None:
        if self._journal.state.finished:
            raise Finished
        if record.status == "expired" or record.expires <= now:
            raise Refusal(409, "the lease has expired")
        if record.lease.expires <= now and record.deferred != envelope.digest:
            raise Refusal(409, "the lease has expired for all but what was deferred")
        if record.status == "released":
            raise Refusal(409, "the lease was given back")
        if record.status != "open":
            raise Refusal(409, "the lease was answered already, with other bytes")


def _place(body: Path, files: SubmissionFiles, signed: bytes) -> None:
    write_small(files.submission_envelope, signed)
    body.rename(files.submission)
    sync_folder(files.submission.parent)
