"""Learner islands: which offers a step has, when it is committed, what each island reported.

The rules:
- Steps are committed in order, each once, after their batch manifest is signed. Offers are taken
  for the next step to commit only. A later offer of an island replaces its earlier one.
- All offers of a step start from the same outer state, which is the one that was reported after the
  step before, and have the same data and the same size.
- An offer counts unless its norm is above `max_norm`.
- A step is committed once every island has offered, or `grace_s` after the quorum was reached, if
  at least the quorum counts and the weights are not all 0. The others are dropped, with the reason.
- An island that cannot fetch a share of the newest record says so. If the other shares suffice, the
  step is open again without that one, and gets another record.
- A record is final once the quorum of its contributors, at least two, has reported a state, or
  `settle_s` after the first report, or at once if no share can be spared. No island goes on before.
- The run stalls if no commit is possible `deadline_s` after the step's first offer. Until the first
  offer no island waits for another, so there is no deadline: the inner updates may take any time.
- A restart of the coordinator starts grace and deadline again.
- The first outer state that an island reports for a step is the step's; others must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rpds import HashTrieMap

from runspec.core.canonical import digest_bytes
from runspec.core.schema import RunSpec
from verify.coordinator.machine import events
from verify.formats.batch import Contribution, Dropped, ShareOffered


@dataclass(frozen=True)
class IslandPolicy:
    """The parts of `learner.islands` that the state machine needs; durations in seconds."""

    names: tuple[str, ...]
    """In the order of the spec."""
    quorum: int
    grace_s: float
    deadline_s: float
    codec: str
    max_norm: float | None
    """Largest L2 norm of a share that counts; None: no bound."""
    settle_s: float
    """After the first report of an outer state, a share may still be said to be lost so long."""

    @classmethod
    def of(cls, spec: RunSpec) -> IslandPolicy | None:
        """Return the policy of a spec; None if it has one learner."""
        islands = spec.learner.islands
        if islands is None:
            return None
        names = tuple(member.name for member in islands.members)
        return cls(
            names,
            len(names) if islands.quorum is None else islands.quorum,
            islands.grace,
            islands.deadline,
            islands.codec.kind,
            islands.max_norm,
            2.0 * islands.silence,
        )

    def refused(self, offer: ShareOffered) -> str:
        """Return why an offer does not count; empty if it does."""
        if self.max_norm is None or offer.norm <= self.max_norm:
            return ""
        return f"its share has norm {offer.norm:.6g}, learner.islands.max_norm is {self.max_norm:g}"


@dataclass(frozen=True)
class IslandTally:
    """Counts of one island over the run."""

    committed: int = 0
    """Steps to which it contributed."""
    bytes: int = 0
    """Bytes of these shares."""
    dropped: int = 0
    last_dropped: str = ""
    """Step and reason of the last drop."""


@dataclass(frozen=True)
class IslandState:
    step: int = 0
    """The next step to commit."""
    offers: Mapping[str, events.OfferReceived] = field(default_factory=dict)
    """Offers for this step, by island."""
    since: float | None = None
    """Start of the deadline: the step's first offer, or the coordinator's last start."""
    quorum_since: float | None = None
    """Start of the grace time; None without a quorum."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Why an offer of this step does not count, by island: its share could not be fetched."""
    before: IslandState | None = None
    """The state before the newest commit; None once its record is final."""
    reporters: frozenset[str] = frozenset()
    """Islands that have reported an outer state of the newest commit."""
    records: HashTrieMap[int, str] = field(default_factory=HashTrieMap)
    """The signed records, by step; those from before a rollback are left out."""
    digests: HashTrieMap[int, str] = field(default_factory=HashTrieMap)
    """Digests of all records."""
    results: HashTrieMap[int, events.OuterResult] = field(default_factory=HashTrieMap)
    """The first outer state that was reported after each step."""
    tallies: Mapping[str, IslandTally] = field(default_factory=dict)

    @property
    def previous(self) -> str | None:
        """Digest of the record before the next one; None before the first."""
        return self.digests.get(self.step - 1)

    def counted(self, policy: IslandPolicy) -> list[ShareOffered]:
        """Return the offers that count, in the order of the spec."""
        missing = self.missing(policy)
        return [self.offers[name].offer for name in policy.names if name not in missing]

    def missing(self, policy: IslandPolicy) -> dict[str, str]:
        """Return the islands without an offer that counts, and why each has none."""
        found = {}
        for name in policy.names:
            received = self.offers.get(name)
            if received is None:
                why = "no share offered"
            else:
                why = self.lost.get(name) or policy.refused(received.offer)
            if why:
                found[name] = why
        return found


@dataclass(frozen=True)
class Commit:
    """Sign the record of the next step to commit."""

    step: int
    base: str
    contributors: list[Contribution]
    dropped: list[Dropped]


def decide_commit(policy: IslandPolicy, islands: IslandState, now: float) -> Commit | None:
    """Decide whether the next step is committed now; None: not yet."""
    counted = islands.counted(policy)
    if islands.quorum_since is None or not _suffice(policy, counted):
        return None
    all_offered = len(islands.offers) == len(policy.names)
    if not all_offered and now < islands.quorum_since + policy.grace_s:
        return None
    late = f", {policy.grace_s:g} s after the quorum of {policy.quorum}"
    dropped = [
        Dropped(name, why if name in islands.offers else why + late)
        for name, why in islands.missing(policy).items()
    ]
    base = counted[0].base
    return Commit(islands.step, base, [Contribution.of(offer) for offer in counted], dropped)


def overdue(policy: IslandPolicy, islands: IslandState, now: float) -> bool:
    """Return whether the run stalls because a step lacks shares."""
    late = islands.since is not None and now >= islands.since + policy.deadline_s
    return late and not _suffice(policy, islands.counted(policy))


def next_due(policy: IslandPolicy, islands: IslandState, now: float) -> float | None:
    """Return when a decision next changes without an event, in seconds since the epoch."""
    ends = []
    if islands.since is not None:
        ends.append(islands.since + policy.deadline_s)
    if islands.quorum_since is not None:
        ends.append(islands.quorum_since + policy.grace_s)
    return min((end for end in ends if end > now), default=None)


def conflict(islands: IslandState, offer: ShareOffered) -> str:
    """Return why an offer cannot stand beside what is known of its step; empty if it can.

    An island's own earlier offer is no obstacle: this one replaces it.
    """
    before = islands.results.get(offer.step - 1)
    if before is not None and before.digest != offer.base:
        return (
            f"island {offer.island} starts step {offer.step} from outer state {offer.base[:16]}, "
            f"but island {before.island} reported {before.digest[:16]}"
        )
    for name, received in islands.offers.items():
        if name == offer.island:
            continue
        other = received.offer
        pairs = {
            "outer state": (offer.base[:16], other.base[:16]),
            "data": (offer.data[:16], other.data[:16]),
            "size of the share": (f"{offer.bytes} bytes", f"{other.bytes} bytes"),
        }
        for what, (own, others) in pairs.items():
            if own != others:
                return (
                    f"islands {offer.island} and {name} differ at step {offer.step}: {what} "
                    f"{own or 'none'}, against {others or 'none'}"
                )
    return ""


def offered(
    policy: IslandPolicy, islands: IslandState, event: events.OfferReceived, closed: int
) -> IslandState:
    """Return the state after an offer.

    Args:
        policy: policy of the run.
        islands: the state before.
        event: the offer.
        closed: number of steps whose batch manifest is signed.

    Raises:
        IllegalTransition: the offer cannot stand.
    """
    offer = event.offer
    _require(offer.island in policy.names, f"no island {offer.island}")
    _require(offer.step == islands.step < closed, f"an offer for step {offer.step}")
    fault = conflict(islands, offer)
    _require(not fault, fault)
    since = event.at if islands.since is None else islands.since
    islands = replace(islands, offers={**islands.offers, offer.island: event}, since=since)
    if len(islands.counted(policy)) < policy.quorum:
        return replace(islands, quorum_since=None)
    reached = event.at if islands.quorum_since is None else islands.quorum_since
    return replace(islands, quorum_since=reached)


def committed(
    policy: IslandPolicy, islands: IslandState, event: events.IslandsCommitted
) -> IslandState:
    """Return the state after a commit.

    Raises:
        IllegalTransition: it is not of the next step, follows another record, or does not name each
            island once, with its offer.
    """
    record = event.record
    _require(record.step == islands.step, f"step {record.step} is committed out of order")
    _require(record.previous == islands.previous, "a commit that follows another record")
    for each in record.contributors:
        received = islands.offers.get(each.island)
        if received is None or Contribution.of(received.offer) != each:
            raise events.IllegalTransition(f"island {each.island} did not offer this share")
        _require(received.offer.base == record.base, f"island {each.island} has another base")
    named = [each.island for each in record.contributors]
    dropped = {each.island: each.reason for each in record.dropped}
    # Each name is in one of two lists, once, in order.
    parts = (named, list(dropped))
    in_order = all(part == [n for n in policy.names if n in part] for part in parts)
    once = in_order and len(named) + len(dropped) == len(policy.names)
    _require(bool(named) and once, "a commit that does not name each island once, in order")
    tallies = {name: islands.tallies.get(name, IslandTally()) for name in policy.names}
    for each in record.contributors:
        tally = tallies[each.island]
        tallies[each.island] = replace(
            tally, committed=tally.committed + 1, bytes=tally.bytes + each.bytes
        )
    for name, reason in dropped.items():
        last = f"step {record.step}: {reason}"
        tallies[name] = replace(tallies[name], dropped=tallies[name].dropped + 1, last_dropped=last)
    return replace(
        islands,
        step=record.step + 1,
        offers={},
        since=None,
        quorum_since=None,
        lost={},
        before=replace(islands, before=None) if len(named) > policy.quorum else None,
        reporters=frozenset(),
        records=islands.records.insert(record.step, event.document),
        digests=islands.digests.insert(record.step, digest_bytes(event.document.encode())),
        tallies=tallies,
    )


def final_at(policy: IslandPolicy, islands: IslandState, step: int) -> float | None:
    """Return when the record of a committed step is final, in seconds since the epoch.

    Returns:
        0 if it is; None if that depends on reports.
    """
    if islands.before is None or step != islands.step - 1:
        return 0.0
    first = islands.results.get(step)
    return None if first is None else first.at + policy.settle_s


def kept(policy: IslandPolicy, islands: IslandState, step: int, island: str, now: float) -> str:
    """Return why a share that cannot be fetched stays in its step's record; empty: it need not."""
    before, final = islands.before, final_at(policy, islands, step)
    if before is None or step != before.step or (final is not None and now >= final):
        return f"step {step} is open, or its record is final"
    rest = [offer for offer in before.counted(policy) if offer.island != island]
    if len(rest) == len(before.counted(policy)):
        return f"the record of step {step} does not name island {island}"
    if not _suffice(policy, rest):
        return f"the other shares of step {step} do not suffice: the quorum is {policy.quorum}"
    return ""


def lost(policy: IslandPolicy, islands: IslandState, event: events.ShareLost) -> IslandState:
    """Return the state in which the newest step is open again, without the share that is lost.

    Raises:
        IllegalTransition: the share must stay.
    """
    why = kept(policy, islands, event.step, event.island, event.at)
    before = islands.before
    if why or before is None:
        raise events.IllegalTransition(why)
    reason = f"island {event.by} could not fetch its share"
    return replace(before, lost={**before.lost, event.island: reason})


def reported(policy: IslandPolicy, islands: IslandState, event: events.OuterResult) -> IslandState:
    """Return the state after the report of an outer state.

    Raises:
        IllegalTransition: the step is not committed, or has another one, or none is needed of this
            island any more.
    """
    _require(event.step < islands.step, "an outer state of a step that is not committed")
    first = islands.results.get(event.step)
    if first is None:
        islands = replace(islands, results=islands.results.insert(event.step, event))
    else:
        _require(first.digest == event.digest, "a second outer state of a step")
        _require(is_awaited(islands, event.step, event.island), "a report that is not needed")
    if islands.before is None or event.step != islands.step - 1:
        return islands
    reporters = islands.reporters | {event.island}
    have = [offer for offer in islands.before.counted(policy) if offer.island in reporters]
    done = len(have) >= max(2, policy.quorum)
    return replace(islands, reporters=reporters, before=None if done else islands.before)


def is_awaited(islands: IslandState, step: int, island: str) -> bool:
    """Return whether a step's record waits for the report of an island to be final."""
    newest = islands.before is not None and step == islands.step - 1
    return newest and island not in islands.reporters


def restarted(islands: IslandState, at: float) -> IslandState:
    """Return the state after a start of the coordinator: grace and deadline begin again."""
    return replace(
        islands,
        since=None if islands.since is None else at,
        quorum_since=None if islands.quorum_since is None else at,
    )


def rolled_back(islands: IslandState, version: int) -> IslandState:
    """Return the state after a rollback to a version: the steps before it stay committed.

    Their records were signed with the keys from before, so they are not served any more. The next
    record still names the last of them.
    """
    digests = HashTrieMap({s: d for s, d in islands.digests.items() if s < version})
    results = HashTrieMap({s: r for s, r in islands.results.items() if s < version})
    return IslandState(version, digests=digests, results=results, tallies=islands.tallies)


def _suffice(policy: IslandPolicy, counted: Sequence[ShareOffered]) -> bool:
    return len(counted) >= policy.quorum and sum(offer.weight for offer in counted) > 0.0


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise events.IllegalTransition(otherwise)
