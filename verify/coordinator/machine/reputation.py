"""Reputation, quarantine and ban of a worker: pure functions of what the ledger counts.

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
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
