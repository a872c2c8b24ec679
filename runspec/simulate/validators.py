"""Validators of a simulated run: their queue, their checks, their failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from random import Random

from runspec.simulate.coordinator import Coordinator
from runspec.simulate.model import VALIDATORS, Interval, Lengths
from runspec.simulate.population import ValidatorsBlock
from verify.coordinator.machine.events import GroupGrade, SubmissionJudged, SubmissionSetAside
from verify.coordinator.machine.state import LeaseRecord
from verify.coordinator.machine.trust import Claims

UNRECOMPUTED_S_TOKEN = 15e-6
"""Seconds an output token of a submission that is not recomputed: parsing, grading, checks and
verdict rows of the laptop profile (docs/performance.md, "The validator")."""
REFUSED_S = 0.02
"""Seconds of a submission that cannot be parsed: its transfer and verdict (docs/performance.md)."""
_REASONS = {
    "rubbish": "format: no safetensors file",
    "wrong": "logprobs_submission: 0.5 > 0.01",
}


@dataclass
class _Validator:
    name: str
    rng: Random
    """Random numbers for its failures, and for which submissions it recomputes."""
    submission: str | None = None
    works: bool = True
    life: int = 0


class Validators:
    """Judges submissions in the order and by the claims of `verify.coordinator`.

    Args:
        coordinator: the coordinator of the run.
        checks: their number, speed and failures.
        recompute_s: seconds of the whole check of a lease's submission, at speed 1.
        request_s: seconds of one request to the coordinator.
        seed: seed of all random numbers.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        checks: ValidatorsBlock,
        recompute_s: Callable[[Lengths], float],
        request_s: float,
        seed: int,
    ) -> None:
        self._coordinator, self._clock = coordinator, coordinator.clock
        self._checks, self._claims = checks, Claims()
        self._recompute_s, self._request_s = recompute_s, request_s
        self.count = checks.count or 0
        names = [f"validator-{number}" for number in range(self.count)]
        self._all = [_Validator(name, Random(f"{seed}/{name}")) for name in names]
        for validator in self._all:
            self._plan_failure(validator)

    def next_change(self) -> float:
        """Return the time at which time alone may give a validator work; infinite: never."""
        due = self._claims.next_change(self._clock.now)
        return inf if due is None else due

    def received(self, digest: str) -> None:
        """Accept a submission at once if there are no validators."""
        if not self._all:
            self._judge(self._coordinator.state.leases[digest], "nobody", recomputed=False)

    def take_work(self) -> None:
        """Assign submissions to free validators."""
        now, state = self._clock.now, self._coordinator.state
        waiting = {r.submission: r for r in state.to_judge if r.submission is not None}
        if not waiting:
            return
        for validator in self._all:
            if validator.submission is not None:
                self._claims.prolong(validator.name, now)
        for validator in self._all:
            if validator.works and validator.submission is None:
                known = self._known() if self._claims.suspects else None
                judged = known.submission if known else None
                chosen = self._claims.claim(validator.name, waiting, now, judged=judged)
                if chosen is not None:
                    record = waiting.get(chosen) or known
                    assert record is not None
                    self._begin(validator, record)
                elif not self._claims.suspects:
                    return

    def _known(self) -> LeaseRecord | None:
        """Return an accepted submission, with which a validator can show that it works."""
        state = self._coordinator.state
        accepted = (r for r in reversed(list(state.leases.values())) if r.status == "accepted")
        return next((r for r in accepted if state.lag(r) <= state.policy.async_level), None)

    def _begin(self, validator: _Validator, record: LeaseRecord) -> None:
        share = self._coordinator.state.share_of(record.lease.worker)
        recomputed = validator.rng.random() < (1.0 if record.status == "accepted" else share)
        seconds = self._seconds(record, recomputed)
        validator.submission, life = record.submission, validator.life

        def end() -> None:
            if validator.life == life:
                start, step = self._clock.now - seconds, record.lease.step
                check = Interval(VALIDATORS, validator.name, "check", step, start, start + seconds)
                self._coordinator.intervals.append(check)
                self._end(validator, record, recomputed)

        self._clock.after(seconds + 2 * self._request_s, end)

    def _seconds(self, record: LeaseRecord, recomputed: bool) -> float:
        content = self._coordinator.contents[record.digest]
        if content == "rubbish":
            return REFUSED_S
        lengths = self._coordinator.lengths(record.digest)
        seconds = self._recompute_s(lengths)
        if not recomputed:
            seconds = min(seconds, UNRECOMPUTED_S_TOKEN * sum(lengths))
        return seconds / self._checks.speed

    def _end(self, validator: _Validator, record: LeaseRecord, recomputed: bool) -> None:
        validator.submission = None
        assert record.submission is not None
        current = self._coordinator.state.leases.get(record.digest)
        if current is not None and current.status == "submitted":
            self._judge(current, validator.name, recomputed=recomputed)
        self._claims.settle(validator.name, record.submission)
        waiting = {r.submission: r for r in self._coordinator.state.to_judge}
        for submission, attempts in self._claims.hopeless().items():
            if hopeless := waiting.get(submission):
                self._coordinator.record(
                    SubmissionSetAside(self._clock.now, hopeless.digest, submission, attempts)
                )
            self._claims.forget(submission)

    def _judge(self, record: LeaseRecord, validator: str, *, recomputed: bool) -> None:
        content = self._coordinator.contents[record.digest]
        accepted = content == "rollouts" or (content == "wrong" and not recomputed)
        size = self._coordinator.state.policy.group_size
        lengths, grades = self._coordinator.lengths(record.digest), []
        for group in range(record.lease.groups if accepted else 0):
            filtered = self._coordinator.filtered(record.digest, group)
            tokens = int(sum(lengths[group * size : (group + 1) * size]))
            grades.append(
                GroupGrade(
                    group=group,
                    outcome="filtered" if filtered else "usable",
                    rollouts=size,
                    tokens=tokens,
                    target=None,
                    task_reward=0.0 if filtered else 0.5,
                    reward=0.5,
                    length_error=None,
                    logprob_diff=0.0 if recomputed else None,
                )
            )
        assert record.submission is not None
        self._coordinator.record(
            SubmissionJudged(
                at=self._clock.now,
                lease=record.digest,
                submission=record.submission,
                verdict=f"verdict on {record.submission}",
                validator=validator,
                accepted=accepted,
                reason="" if accepted else _REASONS[content],
                groups=tuple(grades),
            )
        )

    def _plan_failure(self, validator: _Validator) -> None:
        """Schedule the failure of a validator's process; its claim then counts as failed once."""
        if self._checks.fails is None:
            return

        def fail() -> None:
            validator.life, validator.works = validator.life + 1, False
            validator.submission = None
            self._clock.after(self._checks.restarts, restart)

        def restart() -> None:
            validator.works = True
            self._claims.keep(validator.name, (), self._clock.now)
            self._plan_failure(validator)
            self._coordinator.touched = True

        self._clock.after(validator.rng.expovariate(1.0 / self._checks.fails), fail)
