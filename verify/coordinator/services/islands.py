"""Service for learner islands: takes offers, signs commit records, compares outer states.

It also serves the batch manifests and the rollouts that they name, to islands that do not see the
run directory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from runspec.core.keys import SigningKey
from runspec.core.metrics import counter, gauge
from runspec.core.roles import Roles
from runspec.core.run_files import submission_files
from runspec.core.signed import BadSignature
from verify.coordinator.intake import Refusal, refusing
from verify.coordinator.journal import Journal
from verify.coordinator.machine import events, islands
from verify.coordinator.machine.islands import IslandPolicy, IslandState, IslandTally
from verify.coordinator.machine.stalls import Stalled, uncommitted
from verify.coordinator.machine.state import State
from verify.coordinator.services.activity import Activity
from verify.formats.batch import open_batch
from verify.formats.islands import CommitRecord, OuterStates, StoredOuter, open_offer, sign_commit

_log = logging.getLogger(__name__)
_AGAIN_S = 1.0
"""Seconds until a manifest that is signed, but not on the disk, is looked for again."""


class Islands:
    """The coordinator's side of learner islands.

    Args:
        journal: records the events; its policy has islands.
        run: name of the run.
        key: signs the records.
        roles: has the islands' keys.
        seen: activity of the islands by their names.
    """

    def __init__(
        self, journal: Journal, run: str, key: SigningKey, roles: Roles, seen: Activity
    ) -> None:
        policy = journal.state.policy.islands
        assert policy is not None
        self._journal, self._run, self._key, self._policy = journal, run, key, policy
        self._seen = seen
        self._keys = {name: roles.islands[name] for name in policy.names}
        self._names = {key: name for name, key in self._keys.items()}
        self._stored: dict[str, StoredOuter] = {}
        self._files: tuple[int, Mapping[str, Path]] = (-1, {})
        """A step, and the paths of the files that its manifest names."""

    def caller(self, key: str) -> str:
        """Return the island that made a request, by its public key, and record its activity.

        Raises:
            Refusal: 403, the key is none's.
        """
        if key not in self._names:
            raise Refusal(403, "roles.json does not name this key as an island's")
        self._seen.seen(self._names[key], self._journal.clock())
        return self._names[key]

    def announce(self, outer: StoredOuter) -> None:
        """Remember the newest outer state that an island's store has, for islands that join.

        It is not recorded: an island announces itself again when it starts and when it stores one.
        """
        self._stored[outer.island] = outer

    def stored(self) -> OuterStates:
        """Return the outer states that were announced, and how far the run is."""
        found = self._journal.state.islands
        oldest = min(found.records, default=found.step)
        return OuterStates(list(self._stored.values()), found.step, oldest)

    def offer(self, island: str, data: bytes) -> None:
        """Record an island's signed offer for the next step to commit.

        The same offer again changes nothing, another one of the island replaces its earlier one.

        Raises:
            Refusal: 400 malformed; 403 another island's; 409 the step is committed or not signed
                yet, or the offer contradicts what is known.
        """
        with refusing(400, BadSignature):
            offer = open_offer(data, keys=self._keys, run=self._run)
        if offer.island != island:
            raise Refusal(403, f"the offer is of island {offer.island}")
        state = self._journal.state
        if offer.step < state.islands.step:
            raise Refusal(409, f"step {offer.step} is committed: its record names who contributed")
        if not offer.step == state.islands.step < state.next_close:
            raise Refusal(
                409,
                f"an offer for step {offer.step}: the next step to commit is {state.islands.step}, "
                f"and {state.next_close} steps have a batch manifest",
            )
        before = state.islands.offers.get(island)
        if before is not None and before.offer == offer:
            return
        if fault := islands.conflict(state.islands, offer):
            _log.error("offer refused: %s", fault)
            raise Refusal(409, fault)
        self._journal.record(events.OfferReceived(self._journal.clock(), offer, data.decode()))
        if refused := self._policy.refused(offer):
            _log.warning("step %d: island %s does not count: %s", offer.step, island, refused)

    async def record(self, step: int, wait_s: float) -> bytes | dict[str, Any]:
        """Return the signed record of a step.

        If there is none within `wait_s` seconds, return who has offered a share, and for whom the
        step waits.

        Raises:
            Refusal: 404, the record is from before a rollback.
        """
        deadline = self._journal.clock() + wait_s
        while True:
            found = self._journal.state.islands
            if step in found.records:
                return found.records[step].encode()
            if step < found.step:
                raise Refusal(404, f"the record of step {step} is from before a rollback")
            if not await self._journal.change(deadline):
                missing = found.missing(self._policy)
                offered = [name for name in self._policy.names if name not in missing]
                return {"waiting_for": missing, "offered": offered}

    def lost(self, by: str, step: int, island: str) -> None:
        """Open a step again, because an island cannot fetch another's share.

        Raises:
            Refusal: 409, the share stays in the step's record.
        """
        now = self._journal.clock()
        if why := islands.kept(self._policy, self._journal.state.islands, step, island, now):
            raise Refusal(409, why)
        self._journal.record(events.ShareLost(now, step, island, by))
        _log.warning("step %d: island %s cannot fetch the share of %s", step, by, island)

    async def result(self, island: str, step: int, record: str, digest: str, wait_s: float) -> bool:
        """Record the outer state that an island made of a step's record.

        Args:
            island: its name.
            step: of the record.
            record: the record's digest.
            digest: digest of the outer state.
            wait_s: seconds to wait for the record to be final.

        Returns:
            Whether the record is final, so that the island may go on.

        Raises:
            Refusal: 409, the step has another record or none, or another island reported another
                state.
        """
        deadline = self._journal.clock() + wait_s
        while True:
            found, now = self._journal.state.islands, self._journal.clock()
            if found.digests.get(step) != record:
                raise Refusal(409, f"step {step} has no record {record[:16]}")
            first = found.results.get(step)
            if first is not None and first.digest != digest:
                words = (
                    f"after step {step} island {island} has outer state {digest[:16]}, but island "
                    f"{first.island} has {first.digest[:16]}"
                )
                _log.error("%s", words)
                raise Refusal(409, words)
            if first is None or islands.is_awaited(found, step, island):
                self._journal.record(events.OuterResult(now, step, island, digest))
            final = islands.final_at(self._policy, self._journal.state.islands, step)
            if final is not None and now >= final:
                return True
            if not await self._journal.change(deadline, due=final):
                return False

    def result_of(self, step: int) -> str | None:
        """Return the digest of the outer state after a step; None if none was reported."""
        first = self._journal.state.islands.results.get(step)
        return None if first is None else first.digest

    async def batch(self, step: int, wait_s: float) -> Path | None:
        """Return the file of a step's signed manifest; None if there is none within `wait_s` s.

        Raises:
            Refusal: 404, the run has no such step.
        """
        if step >= self._journal.state.policy.steps:
            raise Refusal(404, f"the run has {self._journal.state.policy.steps} steps")
        deadline = self._journal.clock() + wait_s
        path = self._journal.batch_path(step)
        while True:
            closed = step < self._journal.state.next_close
            if closed and path.exists():
                return path
            # A full disk delays the file of a step that is closed.
            due = self._journal.clock() + _AGAIN_S if closed else None
            if not await self._journal.change(deadline, due=due):
                return None

    def file(self, step: int, name: str) -> Path | None:
        """Return the path of a file that the manifest of a closed step names; None: it names none.

        Raises:
            Refusal: 404, there is no manifest.
        """
        if self._files[0] != step:
            if self._journal.state.policy.rows_per_step or step >= self._journal.state.next_close:
                raise Refusal(404, f"no manifest of step {step} names files")
            with refusing(404, OSError, what="the manifest cannot be read: "):
                data = self._journal.batch_path(step).read_bytes()
            with refusing(404, BadSignature):
                manifest = open_batch(data, coordinators=None, run=self._run, step=step)
            paths: dict[str, Path] = {}
            for group in manifest.groups:
                files = submission_files(self._journal.run_dir, group.step, group.submission)
                paths |= {path.name: path for path in vars(files).values()}
            self._files = step, paths
        return self._files[1].get(name)

    def advance(self, now: float) -> Stalled | None:
        """Commit the next step if it is due, or return why the run cannot go on.

        Raises:
            NotNow, UserError: as `Journal.record` does.
        """
        state = self._journal.state
        commit = islands.decide_commit(self._policy, state.islands, now)
        if commit is None:
            late = islands.overdue(self._policy, state.islands, now)
            return uncommitted(state, now) if late else None
        record = CommitRecord(
            *(self._run, commit.step, commit.base, self._policy.codec),
            *(commit.contributors, commit.dropped, state.islands.previous),
            *self._journal.ledger.head,
        )
        document = sign_commit(record, self._key).decode()
        self._journal.record(events.IslandsCommitted(now, record, document))
        names = ", ".join(each.island for each in commit.contributors)
        _log.info("step %d is committed: islands %s contribute", commit.step, names)
        for drop in commit.dropped:
            _log.warning("step %d: island %s is dropped: %s", commit.step, drop.island, drop.reason)
        return None

    def next_due(self, now: float) -> float | None:
        """Return when `advance` next has something to do without an event."""
        return islands.next_due(self._policy, self._journal.state.islands, now)


def report(state: State, seen: Activity, now: float) -> dict[str, Any] | None:
    """Return the islands' part of the status; None for a run with one learner.

    Args:
        state: state of the run.
        seen: activity of the islands' keys by their names.
        now: seconds since the epoch.
    """
    policy, found = state.policy.islands, state.islands
    if policy is None:
        return None
    deadline = None if found.since is None else found.since + policy.deadline_s
    return {
        "committed": found.step,
        "waiting_for": found.missing(policy) if found.step < state.next_close else {},
        "deadline": deadline,
        "members": [_member(policy, found, seen, name, now) for name in policy.names],
    }


def _member(
    policy: IslandPolicy, found: IslandState, seen: Activity, name: str, now: float
) -> dict[str, Any]:
    peer, tally = seen.peers.get(name), found.tallies.get(name, IslandTally())
    return {
        "name": name,
        "offered": name in found.offers,
        "committed": tally.committed,
        "bytes": tally.bytes,
        "dropped": tally.dropped,
        "last_dropped": tally.last_dropped,
        "silent_s": None if peer is None else round(now - peer.last_seen, 3),
    }


def metrics(found: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the islands' metrics, made from `report`."""
    waiting = len(found["waiting_for"])
    text = "Islands whose share the next step lacks."
    yield gauge("coordinator_islands_waited_for", text, waiting)
    text = "Steps that islands committed."
    yield counter("coordinator_islands_committed_steps", text, found["committed"])

    def each(key: str) -> dict[str, float]:
        return {member["name"]: float(member[key]) for member in found["members"]}

    text = "1 if the island offered a share of the next step."
    yield gauge("coordinator_island_offered", text, each("offered"), "island")
    counters = {
        "committed_steps": ("Steps to which the island contributed.", "committed"),
        "dropped_steps": ("Steps whose commit dropped the island.", "dropped"),
        "share_bytes": ("Bytes of the island's committed shares.", "bytes"),
    }
    for name, (text, key) in counters.items():
        yield counter(f"coordinator_island_{name}", text, each(key), "island")
