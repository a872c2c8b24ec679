"""Which validator works on which submission. A validator that dies loses no submission.

An attempt that ends without a verdict has failed: the validator's process no longer knows of the
claim (it died), its time ran out (it hangs), or the validator says that its own check broke. The
file may be at fault, so that one file must not end validator after validator; or the validator may,
and then no file must suffer for it. Hence:
- A submission with a failed attempt is a suspect. It is offered alone: who holds a suspect holds
  nothing else, so that an innocent file fails beside a guilty one only once. Others come first, but
  for one that has waited `SUSPECT_WAIT_S`: a validator that judged others since it last failed
  takes it in turn with them, so that neither suspects nor honest work wait without end.
- A failed attempt counts once the same validator has judged another submission after it. Where a
  validator fails at everything, nothing counts, and everything waits for one that works.
- So that this needs no new work, a validator that failed is given one that was judged before, when
  only suspects are left: its verdict changes nothing, and shows that the validator works.
- A suspect is left to validators that have not failed at it, while one of them asks for work.
- What failed `ATTEMPTS` times that count is hopeless: to be set aside (`SubmissionSetAside`).

Claims and failed attempts live in memory: after a restart of the coordinator everything unjudged
is offered again, and nothing is a suspect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from runspec.core.errors import one_line
from verify.coordinator.machine.events import FailedAttempt
from verify.timeouts import STAGE_DEADLINES_S

CLAIM_TIMEOUT_S = 300.0
"""A claim is offered to the next validator if its own was silent for this long."""
LONGEST_CLAIM_S = sum(STAGE_DEADLINES_S.values())
"""A claim is offered to the next validator after this time, even if its own sends heartbeats."""
ATTEMPTS = 3
"""The first is beside other submissions, which may be at fault; the second and third are alone."""
ASKED_LATELY_S = 60.0
"""For how long a validator that asked for work is expected to ask again."""
SUSPECT_WAIT_S = 120.0
"""Seconds a suspect waits after its last attempt, while there are other submissions."""
_MAX_REASON = 300
_MAX_FAILURES = 16
"""The last failures of one submission that are remembered."""


@dataclass(frozen=True)
class Claim:
    validator: str
    until: float
    end: float
    """Time beyond which nothing extends it."""


@dataclass(frozen=True)
class Failure:
    attempt: FailedAttempt
    counts: bool = False
    """Whether its validator has judged another submission since."""


class Claims:
    """Submissions that validators claim, and their failed attempts (see the module)."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        self._failures: dict[str, list[Failure]] = {}
        self._asked: dict[str, float] = {}
        """When each validator last asked for work."""
        self._proving: dict[str, str] = {}
        """For each validator, the submission that it judges again to show that it works."""

    def __len__(self) -> int:
        return len(self._claims)

    @property
    def suspects(self) -> int:
        """Submissions that an attempt failed at."""
        return len(self._failures)

    def keep(self, validator: str, holding: Collection[str], now: float) -> None:
        """Frees claims of the validator's key that its process no longer holds."""
        if self._proving.get(validator) not in holding:
            self._proving.pop(validator, None)
        for submission in self._held_by(validator):
            if submission not in holding:
                self.fail(validator, submission, "the validator's process ended", now)

    def prolong(self, validator: str, now: float) -> None:
        """Extends the claims of a validator that sent a heartbeat, as in a long prefill."""
        for submission in self._held_by(validator):
            claim = self._claims[submission]
            until = max(claim.until, min(now + CLAIM_TIMEOUT_S, claim.end))
            self._claims[submission] = replace(claim, until=until)

    def fail(self, validator: str, submission: str, reason: str, now: float) -> None:
        """An attempt ended without a verdict; nothing where the validator has no claim."""
        if self.give_back(validator, submission):
            attempt = FailedAttempt(now, validator, one_line(reason, _MAX_REASON))
            failures = [*self._failures.get(submission, ()), Failure(attempt)]
            self._failures[submission] = failures[-_MAX_FAILURES:]

    def give_back(self, validator: str, submission: str) -> bool:
        """Frees a claim that nothing speaks against; whether there was one."""
        claim = self._claims.get(submission)
        if claim is None or claim.validator != validator:
            return False
        del self._claims[submission]
        return True

    def claim(
        self, validator: str, submissions: Iterable[str], now: float, *, judged: str | None = None
    ) -> str | None:
        """Claims a submission that no one works on: the first, but suspects late and alone.

        Args:
            validator: who asks.
            submissions: all that wait for a verdict, in the order in which they are wanted.
            now: seconds since the epoch.
            judged: one that was accepted before, for validators that have to show that they work.
        """
        self._expire(now)
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
        unproven = self._has_to_prove_itself(validator)
        first = overdue if not unproven else []
        chosen = next(iter([*first, *others, *suspects]), None)
        if unproven and chosen in self._failures and judged is not None:
            self._proving[validator] = judged
            return judged
        if chosen is not None:
            self._claims[chosen] = Claim(validator, now + CLAIM_TIMEOUT_S, now + LONGEST_CLAIM_S)
        return chosen

    def settle(self, validator: str, submission: str) -> None:
        """Records a verdict. Its validator works, so its earlier failures count."""
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
        """Forgets a submission that waits for no verdict any more."""
        self._claims.pop(submission, None)
        self._failures.pop(submission, None)

    def next_change(self, now: float) -> float | None:
        """When time alone will next make something claimable."""
        times = [claim.until for claim in self._claims.values()]
        if self._failures:
            times += [
                at + ASKED_LATELY_S for at in self._asked.values()
            ]  # the others' turn is over
        return min((at for at in times if at > now), default=None)

    def _held_by(self, validator: str) -> Iterator[str]:
        return (s for s, claim in list(self._claims.items()) if claim.validator == validator)

    def _expire(self, now: float) -> None:
        for submission, claim in list(self._claims.items()):
            if claim.until <= now:
                since = now - claim.end + LONGEST_CLAIM_S
                words = f"no verdict after {since:.0f} s"
                self.fail(claim.validator, submission, words, now)

    def _suspects_for(self, validator: str, free: list[str], now: float) -> list[str]:
        """Those that it has not failed at, or that no other who asks for work has not; first what
        failed least often, so that the innocent of a batch do not wait for the guilty one."""
        asking = {v for v, at in self._asked.items() if now < at + ASKED_LATELY_S}
        found = []
        for submission in free:
            failed = {f.attempt.validator for f in self._failures.get(submission, ())}
            if failed and (validator not in failed or asking <= failed):
                found.append(submission)
        return sorted(found, key=lambda submission: len(self._failures[submission]))

    def _has_to_prove_itself(self, validator: str) -> bool:
        """Whether it has judged nothing since it failed at something that still waits."""
        return any(
            failure.attempt.validator == validator and not failure.counts
            for failures in self._failures.values()
            for failure in failures
        )
