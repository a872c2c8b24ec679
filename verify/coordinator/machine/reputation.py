"""Reputation, quarantine and ban of a worker: pure functions of what the ledger counts.

Reputation is the mean of a Beta posterior: the chance that the next submission is as good as those
that were recomputed,

    r = n / (n + 20 + 20 (R + W))      0 for a new key, towards 1 with work

n: submissions that were accepted *and recomputed* since the last failure; what nobody recomputed
proves nothing. R: rejected submissions, W: withheld leases, both of all time. So reputation is lost
at one failure and comes back more slowly each time. The share of a worker's submissions that is
recomputed follows from it,

    share = prefill_share - (prefill_share - prefill_floor) r        1 in quarantine

Strikes are the rejections since the last `CLEAR_AFTER` accepted submissions in a row. A rejection
that no honest worker meets by accident (`EXACT_CHECKS` compare with what was assigned, without
floating point; `WORKERS_GAPS`, with a stated chance) puts a worker into quarantine, as do
`QUARANTINE_AFTER` strikes; `CLEAR_AFTER` in a row that are recomputed and accepted end it.
`BAN_AFTER` strikes are a ban, which only a person lifts. A submission at which validators failed
(`SubmissionSetAside`) is a strike and no rejection: one says little of its worker, who may have met
a fault of ours, and many of one worker's must not go on.
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
"""The check of all submissions of a worker together (`gap_history`)."""
QUARANTINE_AFTER = 2
BAN_AFTER = 6
CLEAR_AFTER = 5
_PRIOR = 20.0
_REJECTION = 20.0
"""A rejection, or a withheld lease, weighs as much as all that a new key has to prove."""


@dataclass(frozen=True)
class Standing:
    """Counts of a worker's leases and submissions, and its quarantine."""

    accepted: int = 0
    """Submissions."""
    rejected: int = 0
    withheld: int = 0
    """Leases."""
    in_a_row: int = 0
    """Accepted since the last rejection; in quarantine accepted *and recomputed* since it began."""
    recomputed_in_a_row: int = 0
    """Accepted and recomputed since the last rejection or withheld lease."""
    delivered: int = 0
    """Groups accepted in time since it last failed to answer a lease, or gave one back."""
    late: int = 0
    """Leases that others were leased in its place."""
    strikes: int = 0
    quarantine: str | None = None
    """Why all its work is recomputed and it holds one lease at most; None: it is free."""

    @property
    def trust(self) -> int:
        """How many groups of its open leases steps may rely on, if it is a stranger."""
        return self.delivered // (1 + self.rejected + self.withheld + self.late)

    def after_verdict(self, groups: int, *, accepted: bool, recomputed: bool) -> Standing:
        """After a verdict on one of its submissions."""
        if not accepted:
            return replace(
                self,
                rejected=self.rejected + 1,
                strikes=self.strikes + 1,
                delivered=0,
                in_a_row=0,
                recomputed_in_a_row=0,
            )
        # What was handed in before the quarantine, and nobody recomputed, does not lead out of it.
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
        """After a submission of its at which validators failed."""
        return replace(self, strikes=self.strikes + 1, in_a_row=0)

    def after_withholding(self) -> Standing:
        """After a lease that was not answered."""
        return replace(self, withheld=self.withheld + 1, delivered=0, recomputed_in_a_row=0)

    def after_silence(self) -> Standing:
        """After a lease that others were leased in its place."""
        return replace(self, late=self.late + 1, delivered=0)

    def after_return(self) -> Standing:
        """After a lease that it gave back."""
        return replace(self, delivered=0)

    def quarantined(self, reason: str) -> Standing:
        """From now on `CLEAR_AFTER` in a row are needed that are recomputed and accepted."""
        return replace(self, quarantine=reason, in_a_row=0)

    def pardoned(self, reason: str) -> Standing:
        """A ban is lifted: in quarantine, with a clean slate."""
        return replace(self.quarantined(reason), strikes=0)


def reputation(standing: Standing) -> float:
    """r of the module's formula, in [0, 1)."""
    good = standing.recomputed_in_a_row
    return good / (good + _PRIOR + _REJECTION * (standing.rejected + standing.withheld))


def prefill_share(standing: Standing, *, start: float, floor: float) -> float:
    """Share of a worker's submissions to recompute, in [floor, 1].

    Args:
        standing: the worker's.
        start: `verify.prefill_share`, of a new key.
        floor: `verify.prefill_floor`, which the best reputation comes near.
    """
    if standing.quarantine is not None:
        return 1.0
    return max(floor, start - (start - floor) * reputation(standing))


def should_quarantine(standing: Standing, reason: str) -> bool:
    """Whether a rejection just counted puts a worker into quarantine.

    Args:
        standing: after the rejection.
        reason: of the verdict, which begins with the check's name and a colon.
    """
    if standing.quarantine is not None:
        return False
    no_accident = reason.partition(":")[0] in EXACT_CHECKS | {WORKERS_GAPS}
    return no_accident or standing.strikes >= QUARANTINE_AFTER
