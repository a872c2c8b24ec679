"""Trust in workers and validators: reputation, quarantine and ban of a worker, and claims.

Reputation, quarantine and ban are pure functions of what the ledger counts.
Reputation is the mean of a Beta posterior, the chance that the next submission is as good as the
recomputed ones:

    r = n / (n + 20 + 20 (R + W))      0 for a new key, near 1 after much work

n counts the submissions that were accepted *and recomputed* since the last failure; a submission
that was not recomputed proves nothing. R counts rejected submissions and W withheld leases, both of
all time. So one failure costs the whole reputation, and each time it takes longer to regain. The
share of a worker's submissions that is recomputed follows from it:

    share = prefill_share - (prefill_share - prefill_floor) r        1 in quarantine

Strikes are the rejections since the last `CLEAR_AFTER` accepted submissions in a row. Some
rejections do not happen to an honest worker by accident: `EXACT_CHECKS` compare with the assignment
and use no floating point, and `WORKERS_GAPS` has a stated chance. One of them puts a worker into
quarantine, as do `QUARANTINE_AFTER` strikes. `CLEAR_AFTER` submissions in a row that are recomputed
and accepted end the quarantine. `BAN_AFTER` strikes are a ban, which only a person lifts. A
submission at which validators failed (`SubmissionSetAside`) is a strike but no rejection: the
worker may have met a fault of the validators, but must not cause many such failures.

`Claims` records which validator works on which submission, so that a dead validator loses none.
An attempt that ends without a verdict has failed: the validator's process does not know the claim
any more (it died), its time ran out (it hangs), or the validator reports that its check broke. If
the file is at fault, it must not end one validator after the other. If the validator is at fault,
no file must suffer for it. So the rules are:
- A submission with a failed attempt is a suspect. It is offered alone: a validator that holds a
  suspect holds nothing else. So a good file fails together with a bad one only once. Other
  submissions come first. But if a suspect has waited for `SUSPECT_WAIT_S`, a validator that has
  judged a submission since its last failure takes it, so no submission waits without end.
- A failed attempt counts once the same validator has judged another submission after it. If a
  validator fails at everything, no attempt counts, and the submissions wait for another validator.
- If only suspects are left, a validator that failed is given a submission that was judged before.
  Its verdict changes nothing, and shows that the validator works.
- A suspect is left to validators that have not failed at it, while one of them asks for work.
- A submission with `ATTEMPTS` failed attempts that count is set aside (`SubmissionSetAside`).

Claims and failed attempts are in memory only. After a restart of the coordinator all submissions
without a verdict are offered again, and none is a suspect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from runspec.core.errors import one_line
from verify import STAGE_DEADLINES_S
from verify.coordinator.machine.events import FailedAttempt

EXACT_CHECKS = frozenset(
    {
        *("signature", "lease", "format", "assignment", "bounds"),
        *("versions", "termination", "proof_format"),
    }
)
WORKERS_GAPS = "seeded_sampling_worker"
"""Name of the check of all submissions of a worker together (`verdicts`)."""
QUARANTINE_AFTER = 2
BAN_AFTER = 6
CLEAR_AFTER = 5
_PRIOR = 20.0
_REJECTION = 20.0
"""Weight of a rejection or a withheld lease: as much as the prior of a new key."""


@dataclass(frozen=True)
class Standing:
    """Counts of a worker's leases and submissions, and its quarantine."""

    accepted: int = 0
    """Submissions."""
    rejected: int = 0
    withheld: int = 0
    """Leases."""
    in_a_row: int = 0
    """Accepted since the last rejection; in quarantine, recomputed and accepted since its start."""
    recomputed_in_a_row: int = 0
    """Accepted and recomputed since the last rejection or withheld lease."""
    delivered: int = 0
    """Groups accepted in time since it last failed to answer a lease or gave one back."""
    late: int = 0
    """Overdue leases, whose groups others were leased."""
    strikes: int = 0
    quarantine: str | None = None
    """Reason of the quarantine; None: it is not in quarantine."""

    @property
    def trust(self) -> int:
        """Groups of its open leases that steps may rely on, if it is a stranger."""
        return self.delivered // (1 + self.rejected + self.withheld + self.late)

    def after_verdict(self, groups: int, *, accepted: bool, recomputed: bool) -> Standing:
        """Return the standing after a verdict on a submission."""
        if not accepted:
            return replace(
                self,
                rejected=self.rejected + 1,
                strikes=self.strikes + 1,
                delivered=0,
                in_a_row=0,
                recomputed_in_a_row=0,
            )
        # A submission from before the quarantine that was not recomputed does not help to end it.
        row = self.in_a_row + (recomputed or self.quarantine is None)
        return replace(
            self,
            accepted=self.accepted + 1,
            delivered=self.delivered + groups,
            in_a_row=row,
            recomputed_in_a_row=self.recomputed_in_a_row + recomputed,
            strikes=0 if row >= CLEAR_AFTER else self.strikes,
        )

    def after_set_aside(self) -> Standing:
        """Return the standing after a submission at which validators failed."""
        return replace(self, strikes=self.strikes + 1, in_a_row=0)

    def after_withholding(self) -> Standing:
        """Return the standing after a lease that was not answered."""
        return replace(self, withheld=self.withheld + 1, delivered=0, recomputed_in_a_row=0)

    def after_silence(self) -> Standing:
        """Return the standing after a lease that became overdue."""
        return replace(self, late=self.late + 1, delivered=0)

    def after_return(self) -> Standing:
        """Return the standing after a lease that was given back."""
        return replace(self, delivered=0)

    def quarantined(self, reason: str) -> Standing:
        """Return the standing at the start of a quarantine."""
        return replace(self, quarantine=reason, in_a_row=0)

    def pardoned(self, reason: str) -> Standing:
        """Return the standing after a lifted ban: in quarantine, without strikes."""
        return replace(self.quarantined(reason), strikes=0)


def reputation(standing: Standing) -> float:
    """Return r of the module's formula, in [0, 1)."""
    good = standing.recomputed_in_a_row
    return good / (good + _PRIOR + _REJECTION * (standing.rejected + standing.withheld))


def prefill_share(standing: Standing, *, start: float, floor: float) -> float:
    """Return the share of a worker's submissions to recompute, in [floor, 1].

    Args:
        standing: standing of the worker.
        start: `verify.prefill_share`, the share of a new key.
        floor: `verify.prefill_floor`, the share at the best reputation.
    """
    if standing.quarantine is not None:
        return 1.0
    return max(floor, start - (start - floor) * reputation(standing))


def should_quarantine(standing: Standing, reason: str) -> bool:
    """Return whether a rejection puts a worker into quarantine.

    Args:
        standing: standing after the rejection.
        reason: reason of the verdict; it begins with the check's name and a colon.
    """
    if standing.quarantine is not None:
        return False
    no_accident = reason.partition(":")[0] in EXACT_CHECKS | {WORKERS_GAPS}
    return no_accident or standing.strikes >= QUARANTINE_AFTER


CLAIM_TIMEOUT_S = 300.0
"""Seconds of silence after which a submission is offered to another validator."""
LONGEST_CLAIM_S = sum(STAGE_DEADLINES_S.values())
"""Seconds after which a submission is offered to another validator despite heartbeats."""
ATTEMPTS = 3
"""The first attempt is together with other submissions, the second and third are alone."""
ASKED_LATELY_S = 60.0
"""Seconds after which a validator that asked for work is no longer expected to ask again."""
SUSPECT_WAIT_S = 120.0
"""Seconds that a suspect waits after its last attempt while there are other submissions."""
_MAX_REASON = 300
_MAX_FAILURES = 16
"""Largest number of failures of a submission that are remembered, the newest."""


@dataclass(frozen=True)
class Claim:
    validator: str
    until: float
    end: float
    """Time to which heartbeats can extend it at most."""


@dataclass(frozen=True)
class Failure:
    attempt: FailedAttempt
    counts: bool = False
    """Whether its validator has judged another submission since then."""


class Claims:
    """Claims of validators on submissions, and failed attempts; the module has the rules."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        self._failures: dict[str, list[Failure]] = {}
        self._asked: dict[str, float] = {}
        """Time at which each validator last asked for work."""
        self._proving: dict[str, str] = {}
        """For each validator, the judged submission that it judges again to show that it works."""

    def __len__(self) -> int:
        return len(self._claims)

    @property
    def suspects(self) -> int:
        """Number of submissions with a failed attempt."""
        return len(self._failures)

    def keep(self, validator: str, holding: Collection[str], now: float) -> None:
        """Fail the claims of a validator's key that its process no longer holds."""
        if self._proving.get(validator) not in holding:
            self._proving.pop(validator, None)
        for submission in self._held_by(validator):
            if submission not in holding:
                self.fail(validator, submission, "the validator's process ended", now)

    def prolong(self, validator: str, now: float) -> None:
        """Extend the claims of a validator that sent a heartbeat, for example in a long prefill."""
        for submission in self._held_by(validator):
            claim = self._claims[submission]
            until = max(claim.until, min(now + CLAIM_TIMEOUT_S, claim.end))
            self._claims[submission] = replace(claim, until=until)

    def fail(self, validator: str, submission: str, reason: str, now: float) -> None:
        """Record a failed attempt, if the validator has the claim."""
        if self.give_back(validator, submission):
            attempt = FailedAttempt(now, validator, one_line(reason, _MAX_REASON))
            failures = [*self._failures.get(submission, ()), Failure(attempt)]
            self._failures[submission] = failures[-_MAX_FAILURES:]

    def give_back(self, validator: str, submission: str) -> bool:
        """Free a claim without a failed attempt; return whether there was one."""
        claim = self._claims.get(submission)
        if claim is None or claim.validator != validator:
            return False
        del self._claims[submission]
        return True

    def claim(
        self,
        validator: str,
        submissions: Iterable[str],
        now: float,
        *,
        judged: Callable[[], str | None] = lambda: None,
    ) -> str | None:
        """Claim the first free submission; suspects come last and alone.

        Args:
            validator: public key of the validator.
            submissions: all submissions that wait for a verdict, the most urgent first.
            now: seconds since the epoch.
            judged: returns a submission that was accepted before, to show that a validator works.
        """
        for submission, claim in list(self._claims.items()):
            if claim.until <= now:
                since = now - claim.end + LONGEST_CLAIM_S
                self.fail(claim.validator, submission, f"no verdict after {since:.0f} s", now)
        waiting = list(submissions)
        for gone in self._failures.keys() - set(waiting):
            del self._failures[gone]
        self._asked[validator] = now
        held = list(self._held_by(validator))
        if validator in self._proving or any(submission in self._failures for submission in held):
            return None
        free = [submission for submission in waiting if submission not in self._claims]
        others = [submission for submission in free if submission not in self._failures]
        suspects = [] if held else self._suspects_for(validator, free, now)
        overdue = [s for s in suspects if now >= self._failures[s][-1].attempt.at + SUSPECT_WAIT_S]
        # It has judged nothing since it failed at a submission that waits.
        unproven = any(
            failure.attempt.validator == validator and not failure.counts
            for failures in self._failures.values()
            for failure in failures
        )
        first = overdue if not unproven else []
        chosen = next(iter([*first, *others, *suspects]), None)
        if unproven and chosen in self._failures and (known := judged()) is not None:
            self._proving[validator] = known
            return known
        if chosen is not None:
            self._claims[chosen] = Claim(validator, now + CLAIM_TIMEOUT_S, now + LONGEST_CLAIM_S)
        return chosen

    def settle(self, validator: str, submission: str) -> None:
        """Record a verdict. Its validator works, so its earlier failed attempts count."""
        self.forget(submission)
        self._proving.pop(validator, None)
        for other, failures in self._failures.items():
            self._failures[other] = [
                replace(failure, counts=True) if failure.attempt.validator == validator else failure
                for failure in failures
            ]

    def hopeless(self) -> dict[str, tuple[FailedAttempt, ...]]:
        """Return the submissions to set aside, each with its failed attempts."""
        return {
            submission: tuple(failure.attempt for failure in failures)
            for submission, failures in self._failures.items()
            if sum(failure.counts for failure in failures) >= ATTEMPTS
        }

    def forget(self, submission: str) -> None:
        """Forget a submission that no longer waits for a verdict."""
        self._claims.pop(submission, None)
        self._failures.pop(submission, None)

    def next_change(self, now: float) -> float | None:
        """Return when a submission next becomes claimable without an event."""
        times = [claim.until for claim in self._claims.values()]
        if self._failures:
            times += [at + ASKED_LATELY_S for at in self._asked.values()]
        return min((at for at in times if at > now), default=None)

    def _held_by(self, validator: str) -> Iterator[str]:
        return (s for s, claim in list(self._claims.items()) if claim.validator == validator)

    def _suspects_for(self, validator: str, free: list[str], now: float) -> list[str]:
        """Return the suspects for a validator, those with the fewest failures first.

        These are the suspects at which it has not failed, or all that ask for work have failed.
        With this order the good files of a batch do not wait for the bad one.
        """
        asking = {v for v, at in self._asked.items() if now < at + ASKED_LATELY_S}
        found = []
        for submission in free:
            failed = {f.attempt.validator for f in self._failures.get(submission, ())}
            if failed and (validator not in failed or asking <= failed):
                found.append(submission)
        return sorted(found, key=lambda submission: len(self._failures[submission]))
