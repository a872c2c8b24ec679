"""Records which validator works on which submission, so that a dead validator loses none.

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

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from runspec.core.errors import one_line
from verify.coordinator.machine.events import FailedAttempt
from verify.timeouts import STAGE_DEADLINES_S

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
        self, validator: str, submissions: Iterable[str], now: float, *, judged: str | None = None
    ) -> str | None:
        """Claim the first free submission; suspects come last and alone.

        Args:
            validator: public key of the validator.
            submissions: all submissions that wait for a verdict, the most urgent first.
            now: seconds since the epoch.
            judged: a submission that was accepted before, to show that a validator works.
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
        if unproven and chosen in self._failures and judged is not None:
            self._proving[validator] = judged
            return judged
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
