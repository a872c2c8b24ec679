"""Computes the verdict on a submission from its bytes; it sends nothing."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from runspec.core.errors import UserError, one_line
from runspec.core.schema import RunSpec
from verify.checks import Examination, Subject, examine
from verify.checks.prefill import logprob_diff, not_recomputed, prefill_checks
from verify.checks.rows import (
    DUPLICATE_CHECKS,
    GRADE_CHECKS,
    ROW_CHECKS,
    TURN_CHECKS,
    Rejected,
    fingerprints,
    open_rows,
)
from verify.formats.lease import Lease, assignments
from verify.formats.submission import Rollout, max_submission_bytes
from verify.formats.turns import gaps as gaps_of
from verify.formats.verdict import MAX_FAULT, RolloutVerdict
from verify.plugins import Graded, PrefillEngine, TaskSet
from verify.profile import PairLimits
from verify.recompute import Recomputed, Replayed, grade, prefill_request, recompute, replay
from verify.truncation import Truncation
from verify.watchdog import Stages

WEIGHTS_S = 600.0
"""Seconds that submissions stay claimed while their version is fetched."""
_REPLAYS = 32
"""Rollouts of several turns that are replayed at once; their environments run in processes."""
_MOST = 0.9
"""Share of `WEIGHTS_S` after which a failed fetch counts as late. A fetch gives up before an
attempt that would end after the deadline."""


@dataclass(frozen=True)
class SubmissionFile:
    """A submission as the coordinator hands it out."""

    submission: str
    """Digest of `table`."""
    lease: Lease
    """Lease of the submission; its signature was checked."""
    lease_digest: str
    envelope: bytes
    table: bytes


@dataclass(frozen=True)
class Verdict:
    """Verdict of a validator on a submission."""

    submission: str
    step: int
    accepted: bool
    reason: str
    """Why it is rejected: check, row, number, limit."""
    dropped_groups: list[int]
    """Groups lost to a fault of the grader."""
    rows: list[RolloutVerdict]
    """Verdicts on the rows; empty if the rows could not be read."""
    fault: str = ""
    """The grader's error at the last dropped group, as one line."""


@dataclass(frozen=True)
class _Case:
    """A submission between two stages of its check."""

    subject: Subject
    examination: Examination
    faults: dict[int, str]
    """Errors of the grader, by dropped group."""


class WeightsNotHere(UserError):
    """Raised if a version did not arrive in time; the parts that arrived are kept."""


def ensure_weights(engine: PrefillEngine, version: int, manifest_digest: str) -> Path:
    """Return the weights directory of a version.

    Raises:
        WeightsNotHere: it has not arrived within `WEIGHTS_S`.
        UserError: an error that waiting does not end, such as a full disk.
    """
    begun = time.monotonic()
    try:
        return engine.ensure_version(version, manifest_digest, deadline_s=WEIGHTS_S)
    except UserError as error:
        if time.monotonic() - begun < _MOST * WEIGHTS_S:
            raise
        raise WeightsNotHere(error.thing, place=error.place, remedy=error.remedy) from error


class Examiner:
    """Examines submissions of one run.

    Args:
        spec: the run's resolved spec.
        task_set: the run's problems and graders.
        engine: recomputes rollouts.
        vocab_size: rows of the model's output head.
        wants_prefill: returns whether a submission (its digest) is recomputed.
        stages: receives the stage that is under way, and its submissions.

    Raises:
        UserError: a profile of calibrated limits is not valid.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        task_set: TaskSet,
        engine: PrefillEngine,
        vocab_size: int,
        wants_prefill: Callable[[str], bool],
        stages: Stages | None = None,
    ) -> None:
        self._spec, self._task_set, self._engine = spec, task_set, engine
        self._vocab_size, self._wants_prefill = vocab_size, wants_prefill
        self._stages = stages or Stages()
        self._pools = {pool.name: pool for pool in spec.samplers}
        self._limits = PairLimits(spec)
        self._replaying = ThreadPoolExecutor(_REPLAYS, thread_name_prefix="replay")

    def examine(self, files: Sequence[SubmissionFile]) -> list[Verdict]:
        """Examine submissions together; those of one version share a prefill.

        Raises:
            WeightsNotHere: the weights of a version have not arrived.
            UserError: they cannot be fetched, or a lease names no pool.
        """
        verdicts: dict[str, Verdict] = {}
        cases: list[_Case] = []
        for file in files:
            try:
                cases.append(self._before_prefill(file))
            except Rejected as rejected:
                verdicts[file.submission] = Verdict(
                    file.submission, file.lease.step, False, str(rejected), [], []
                )
        for case in self._after_prefill(cases):
            submission = case.subject.submission
            with self._stages.of("duplicates", submission):
                verdicts[submission] = _verdict(case)
        return [verdicts[file.submission] for file in files]

    def _before_prefill(self, file: SubmissionFile) -> _Case:
        """Run the checks that need no model, up to the first that fails."""
        with self._stages.of("decoding", file.submission):
            subject = self._open(file)
        with self._stages.of("rows", file.submission):
            found = examine(ROW_CHECKS, subject)
        if found.reason:
            return _Case(subject, found, {})
        with self._stages.of("grading", file.submission):
            subject = replace(subject, replays=self._replays(subject))
            found = examine(TURN_CHECKS, subject, found)
        if found.reason:
            return _Case(subject, found, {})
        with self._stages.of("grading", file.submission):
            replays = map(subject.replay_of, subject.rollouts)
            episodes = [each.episode if each else None for each in replays]
            grades, faults = grade(subject.rollouts, subject.assignments, self._task_set, episodes)
        subject = replace(subject, grades=grades)
        return _Case(subject, examine(GRADE_CHECKS, subject, found), faults)

    def _replays(self, subject: Subject) -> dict[tuple[int, int], Replayed]:
        """Play the rows whose tasks have several turns, side by side."""
        pairs = [(row, subject.episode_of(row)) for row in subject.rollouts]
        several = [(row, episode) for row, episode in pairs if episode is not None]
        found = self._replaying.map(lambda each: replay(each[0], each[1], subject.pool), several)
        return {
            (row.group, row.sample): each for (row, _), each in zip(several, found, strict=True)
        }

    def _open(self, file: SubmissionFile) -> Subject:
        lease, spec = file.lease, self._spec
        if lease.pool not in self._pools:
            raise UserError(
                f"a lease of pool {lease.pool[:80]!r}; the spec has {', '.join(self._pools)}",
                place="coordinator",
                remedy="coordinator and validator must serve the same run",
            )
        pool = self._pools[lease.pool]
        rollouts = open_rows(
            file.envelope,
            file.table,
            lease=lease,
            lease_digest=file.lease_digest,
            max_rows=lease.groups * spec.grpo.group_size,
            max_bytes=max_submission_bytes(spec, pool),
        )
        return Subject(
            submission=file.submission,
            rollouts=rollouts,
            lease=lease,
            lease_digest=file.lease_digest,
            pool=pool,
            group_size=spec.grpo.group_size,
            vocab_size=self._vocab_size,
            task_set=self._task_set,
            assignments=assignments(
                lease, n_problems=len(self._task_set), targets=self._task_set.targets
            ),
            limits=self._limits.of(lease.pool, lease.devices).limits,
            last_version=spec.steps,
        )

    def _after_prefill(self, cases: list[_Case]) -> list[_Case]:
        """Recompute the submissions that passed so far and were drawn, a version at a time."""
        done = []
        together: dict[tuple[int, str, str, str], list[_Case]] = defaultdict(list)
        for case in cases:
            lease = case.subject.lease
            if not case.examination.reason and self._wants_prefill(case.subject.submission):
                pair = lease.pool, lease.devices
                together[lease.version, lease.manifest_digest, *pair].append(case)
            else:
                done.append(case)
        for (version, digest, name, devices), alike in together.items():
            requests = [
                prefill_request(
                    c.subject.part_of(row),
                    c.subject.lease,
                    seeded=c.subject.pool.sampling.seeded,
                    end_token=self._task_set.eos_token_id,
                    between=replayed.between if (replayed := c.subject.replay_of(row)) else None,
                )
                for c in alike
                for row in c.subject.rollouts
                if c.subject.can_be_recomputed(row)
            ]
            found: Iterator[Recomputed] = iter(())
            if requests:
                # Outside all stages, because late weights are no fault of a submission.
                ensure_weights(self._engine, version, digest)
                sampling, judged = self._pools[name].sampling, self._limits.of(name, devices)
                # How far two values may differ relative to each other, in choice and cut.
                rule = Truncation(sampling.top_p, sampling.top_k, margin=judged.limits.gap)
                with self._stages.of("prefill", *(c.subject.submission for c in alike)):
                    found = iter(
                        recompute(
                            self._engine,
                            version,
                            requests,
                            temperature=sampling.temperature,
                            truncation=rule if rule.cuts else None,
                        )
                    )
            for case in alike:
                subject = case.subject
                recomputed = [
                    next(found) if subject.can_be_recomputed(row) else None
                    for row in subject.rollouts
                ]
                with self._stages.of("prefill checks", case.subject.submission):
                    done.append(_against_prefill(case, recomputed))
        return done


def _against_prefill(case: _Case, recomputed: list[Recomputed | None]) -> _Case:
    subject = replace(case.subject, recomputed=recomputed)
    rows = [number for number, found in enumerate(recomputed) if found is not None]
    found = case.examination
    if rows:
        found = examine(prefill_checks(subject.pool), subject, found, rows)
    for number, row in enumerate(subject.rollouts):
        if recomputed[number] is None:
            found.results[number].append(not_recomputed(row))
    return replace(case, subject=subject, examination=found)


def _verdict(case: _Case) -> Verdict:
    """Compare the rows' fingerprints, if nothing has failed so far, and give the verdict."""
    subject, found = case.subject, case.examination
    if not found.reason:
        recomputed = subject.recomputed or [None] * len(subject.rollouts)
        prints = [
            fingerprints(row.output_tokens, row.logprobs if numbers is None else numbers.logprobs)
            for row, numbers in zip(map(subject.part_of, subject.rollouts), recomputed, strict=True)
        ]
        subject = replace(subject, fingerprints=prints)
        found = examine(DUPLICATE_CHECKS, subject, found)
    rows = [_row_verdict(subject, found, n, row) for n, row in enumerate(subject.rollouts)]
    return Verdict(
        *(subject.submission, subject.lease.step, not found.reason, found.reason),
        *(sorted(case.faults), rows),
        one_line(case.faults[max(case.faults)], MAX_FAULT) if case.faults else "",
    )


def _row_verdict(
    subject: Subject, examination: Examination, number: int, rollout: Rollout
) -> RolloutVerdict:
    graded = (subject.grades[number] if subject.grades else None) or Graded(0.0, 0.0, 0.0)
    recomputed = subject.recomputed[number] if subject.recomputed else None
    noise, gaps = subject.limits.gap_noise, recomputed.seeded_gap if recomputed else None
    replayed = subject.replay_of(rollout)
    failed = replayed is not None and replayed.episode.fault is not None
    if failed:  # its first turns alone were recomputed
        recomputed = None
    between, between_lengths = gaps_of(replayed.between if replayed and not failed else None)
    return RolloutVerdict(
        submission=subject.submission,
        row=number,
        group=rollout.group,
        task_reward=graded.task_reward,
        length_penalty=graded.length_penalty,
        reward=graded.reward,
        length=len(rollout.output_tokens),
        target=rollout.target,
        logprobs=None if recomputed is None else np.asarray(recomputed.logprobs, np.float32),
        logprob_diff=None if recomputed is None else logprob_diff(rollout, recomputed),
        checks=examination.results[number],
        fingerprints=subject.fingerprints[number] if subject.fingerprints else [],
        gap_excess=None if noise is None or gaps is None else noise.excess(gaps),
        answered=graded.answered,
        between=between,
        between_lengths=between_lengths,
    )
