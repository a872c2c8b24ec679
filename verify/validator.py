"""Process of the validator: claims submissions, examines them, signs a verdict file on each.

Every submission that a worker can send gets a verdict. If a check breaks, the submissions are
examined one by one, so that the others get their verdicts. The submission at which it breaks goes
back to the coordinator with the error, so that another validator can try
(`verify.coordinator.machine.trust`). If the coordinator refuses a rejection, the validator sends
one whose reason repeats nothing of a stranger's; an acceptance that is refused goes back like a
check that breaks. If the coordinator or weights cannot be reached, or a check breaks at everything,
the process ends, and its claimed submissions are offered again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from runspec.core.canonical import hash_parts
from runspec.core.errors import UserError, one_line
from runspec.core.http_server import counter, gauge, serve_metrics
from runspec.core.models import read_config
from runspec.core.process import Role, not_retried
from runspec.core.schema import RunSpec
from runspec.core.signed import BadSignature, SigningKey
from verify import plugins
from verify.client import CoordinatorClient, RunFinished, WorkItem, connect, problem_files
from verify.coordinator_http import ContentRefused
from verify.examiner import (
    WEIGHTS_S,
    Examiner,
    SubmissionFile,
    Verdict,
    WeightsNotHere,
    ensure_weights,
)
from verify.formats.lease import lease_digest, open_lease
from verify.formats.verdict import encode_verdicts, sign_verdict
from verify.profile import require_model, require_profiles
from verify.recompute import PrefillNotFinite
from verify.watchdog import Stages, heartbeats, leaving

MAX_CLAIMS = 8
"""Submissions claimed at once; those of one policy version share a prefill."""
WAIT_S = 5.0
"""Seconds of one long poll, and so the longest time that an idle validator takes to end."""
MAX_FAULTS = 3
"""Submissions in a row at which a check may break; then the validator counts as broken."""
_MAX_FAULT = 300
"""Largest number of characters of a fault; it may repeat what a stranger sent."""
_MAX_REASON = 1000
"""The same of a verdict's reason."""
_NEUTRAL_REASON = "verdict: rejected for a reason that cannot be sent; the validator's log has it"


class Validator(Collector):
    """Serves one run until it is finished.

    Args:
        spec: the run's resolved spec.
        key: signs the verdicts; roles.json names its public half.
        coordinator: hands out submissions and receives verdicts.
        engine: recomputes rollouts.
        task_set_of: makes the run's task from a weights directory (its tokenizer).
        log: receives one line a verdict.
    """

    def __init__(
        self,
        spec: RunSpec,
        key: SigningKey,
        coordinator: CoordinatorClient,
        engine: plugins.PrefillEngine,
        *,
        task_set_of: Callable[[Path], plugins.TaskSet],
        log: logging.Logger,
    ) -> None:
        self._spec, self._key, self._log = spec, key, log
        self._task_set_of = task_set_of
        self._coordinator, self._engine = coordinator, engine
        self._examiner: Examiner | None = None
        self._task_set: plugins.TaskSet | None = None
        self._shares: dict[str, float] = {}
        """Chance that a submission is recomputed, by its digest."""
        self._open: dict[str, None] = {}
        """Claimed submissions without a verdict, in order."""
        self._faults_in_a_row = 0
        self._late_since: float | None = None
        """Time at which missing weights were first requested; None if none are missing."""
        self.stages = Stages()
        self.checked = 0
        """Number of submissions with a verdict."""
        self.busy_s = 0.0
        """Seconds spent on these submissions."""
        self._rejected: Counter[str] = Counter()
        """Submissions rejected, by the check that failed."""

    def serve(self, stop: threading.Event) -> None:
        """Claim and check submissions until the run is finished or `stop` is set."""
        try:
            while not stop.is_set():
                if items := self._claim(stop):
                    try:
                        self._check(items)
                        self._late_since = None
                    except WeightsNotHere as error:
                        self._try_again_later(error, stop)
        except RunFinished:
            self._log.info("the run is finished; %d submissions checked", self.checked)

    def _try_again_later(self, late: WeightsNotHere, stop: threading.Event) -> None:
        """Wait before the next attempt to fetch weights; raise `late` after `lease_timeout`.

        A slow network is no fault: other validators may judge the submissions that were given back,
        and the next fetch resumes. Workers have as long for the same bytes.
        """
        now = time.monotonic()
        if self._late_since is None:
            self._late_since = now - WEIGHTS_S
        if now - self._late_since >= self._spec.verify.lease_timeout:
            raise late
        self._log.warning("submissions that need it are given back for now: %s", late)
        stop.wait(WAIT_S)

    def close(self) -> None:
        """End the graders."""
        if self._task_set is not None:
            self._task_set.close()

    def collect(self) -> Iterator[Metric]:
        """Yield the figures for Prometheus, since the process began."""
        rejected, stages = dict(self._rejected), dict(self.stages.spent_s)
        yield counter("validator_verdicts", "Submissions with a verdict.", self.checked)
        text = "Submissions rejected, by the check that failed."
        yield counter("validator_rejected_submissions", text, rejected, "check")
        yield counter("validator_busy_seconds", "Seconds spent on submissions.", self.busy_s)
        yield counter("validator_stage_seconds", "The same, by stage.", stages, "stage")
        claimed = len(self._coordinator.claims)
        yield gauge("validator_claimed_submissions", "Submissions claimed, not judged.", claimed)

    def _claim(self, stop: threading.Event) -> list[WorkItem]:
        """Wait for a submission, then claim further queued submissions."""
        items: list[WorkItem] = []
        while len(items) < MAX_CLAIMS and not stop.is_set():
            item = self._coordinator.next_submission(0.0 if items else WAIT_S)
            if item is None:
                break
            items.append(item)
        return items

    def _check(self, items: list[WorkItem]) -> None:
        """Give a verdict on each claimed submission, or give it back."""
        begun = time.monotonic()
        self._shares = {item.submission: item.share for item in items}
        self._open = dict.fromkeys(self._shares)
        try:
            files = [self._file(item) for item in items]
            examiner = self._examiner or self._prepare(files)
        except Exception:
            self._give_back()
            raise
        self._judge(examiner, files)
        self.busy_s += time.monotonic() - begun

    def _judge(self, examiner: Examiner, files: Sequence[SubmissionFile]) -> None:
        """Examine submissions together; apart, if a check breaks at one of them.

        Raises:
            Exception: the error at the last of `MAX_FAULTS` submissions in a row.
        """
        try:
            verdicts = examiner.examine(files)
        except Exception as error:
            if _is_own_fault(error):
                self._give_back()
                raise
            if len(files) > 1:
                self._log.exception("a check broke; %d submissions are examined apart", len(files))
                for file in files:
                    self._judge(examiner, [file])
                return
            self._log.exception("a check breaks at submission %s alone", files[0].submission[:12])
            self._failed(files[0], error)
            if self._faults_in_a_row >= MAX_FAULTS:
                self._give_back()
                raise
        else:
            for file, verdict in zip(files, verdicts, strict=True):
                self._answer(file, verdict)

    def _give_back(self) -> None:
        """Give submissions without a verdict back to the coordinator, without a failed attempt."""
        with suppress(UserError):  # the error that ends this process has been logged
            self._coordinator.release_claims(list(self._open))

    def _failed(self, file: SubmissionFile, error: Exception) -> None:
        """Give a submission back with the error that it caused."""
        words = one_line(f"{type(error).__name__}: {error}", _MAX_FAULT)
        self._open.pop(file.submission, None)
        self._coordinator.release_claims([file.submission], words)
        self._faults_in_a_row += 1

    def _answer(self, file: SubmissionFile, verdict: Verdict) -> None:
        try:
            try:
                self._send(verdict)
            except ContentRefused as error:
                if verdict.accepted:
                    raise
                self._log.error("verdict refused: %s; its reason: %s", error, verdict.reason)
                verdict = replace(verdict, reason=_NEUTRAL_REASON, rows=[])
                self._send(verdict)
        except ContentRefused as error:
            self._log.exception("the verdict on %s is refused", verdict.submission[:12])
            self._failed(file, error)
            return
        self._open.pop(file.submission, None)
        self._report(file, verdict)
        self._faults_in_a_row = 0
        self.checked += 1
        if not verdict.accepted:
            self._rejected[verdict.reason.partition(":")[0]] += 1

    def _send(self, verdict: Verdict) -> None:
        table = encode_verdicts(verdict.rows)
        envelope = sign_verdict(
            table,
            run=self._spec.name,
            step=verdict.step,
            submission=verdict.submission,
            accepted=verdict.accepted,
            reason=one_line(verdict.reason, _MAX_REASON),
            dropped_groups=verdict.dropped_groups,
            fault=verdict.fault,
            key=self._key,
        )
        self._coordinator.verdict(envelope, table)

    def _file(self, item: WorkItem) -> SubmissionFile:
        """Download a claimed submission.

        One that cannot be downloaded stays claimed, so the attempt counts as failed. If no
        validator can download it, it is set aside.
        """
        try:
            lease = open_lease(item.lease, coordinators=self._coordinator.roles().coordinator)
            table = self._coordinator.download(item.submission)
        except (BadSignature, UserError) as error:
            self._open.pop(item.submission, None)
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"submission {item.submission} has a bad lease: {error}",
                place="coordinator",
                remedy="check the coordinator's log; roles.json must name its key",
            ) from error
        return SubmissionFile(
            item.submission, lease, lease_digest(item.lease), item.envelope, table
        )

    def _prepare(self, files: Sequence[SubmissionFile]) -> Examiner:
        """Load the task with the tokenizer of the first version; all versions have the same."""
        lease = files[0].lease
        directory = ensure_weights(self._engine, lease.version, lease.manifest_digest)
        with not_retried():
            config = read_config(directory)
            if not isinstance(size := config.get("vocab_size"), int) or size < 1:
                raise UserError(f"vocab_size is {size!r}", place=str(directory))
            require_model(self._spec, config)
            self._task_set = self._task_set_of(directory)
            self._examiner = Examiner(
                self._spec,
                task_set=self._task_set,
                engine=self._engine,
                vocab_size=size,
                wants_prefill=self._wants_prefill,
                stages=self.stages,
            )
        return self._examiner

    def _wants_prefill(self, submission: str) -> bool:
        floor = self._spec.verify.lowest_prefill_share
        return is_drawn(self._key, submission, max(floor, self._shares[submission]))

    def _report(self, file: SubmissionFile, verdict: Verdict) -> None:
        what = f"submission {verdict.submission[:12]} of {file.lease.worker[:12]}"
        if not verdict.accepted:
            self._log.warning("step %d: rejected %s: %s", verdict.step, what, verdict.reason)
            return
        rollouts = len(verdict.rows)
        self._log.info("step %d: accepted %s, %d rollouts", verdict.step, what, rollouts)
        if verdict.dropped_groups:
            self._log.error(
                "step %d: groups %s of %s dropped, the grader failed: %s",
                *(verdict.step, verdict.dropped_groups, what, verdict.fault),
            )


def _is_own_fault(error: Exception) -> bool:
    """Return whether the error is not due to a submission, for example if weights are missing.

    A prefill that is not finite may be due to a worker's tokens.
    """
    return isinstance(error, UserError) and not isinstance(error, PrefillNotFinite)


def is_drawn(key: SigningKey, submission: str, share: float) -> bool:
    """Return whether a submission is prefilled: a draw that cannot be predicted without the key.

    Args:
        key: key of the validator. Ed25519 signatures are deterministic, and this one is never sent.
        submission: digest of the submission.
        share: probability; it follows from the worker's reputation
            (`verify.coordinator.machine.trust`).
    """
    secret = key.sign(b"runspec/v1\x00prefill\x00" + submission.encode())
    draw = int.from_bytes(hash_parts("prefill", secret)[:8], "big")
    return draw < share * 2.0**64


def run(role: Role, stop: threading.Event, log: logging.Logger) -> None:
    """Check submissions until the run is finished or `stop` is set.

    Args:
        role: one of the run's validators.
        stop: event that ends the process, within a grace period if the work takes long.
        log: receives messages for people.
    """
    client, key = connect(role)
    with leaving(stop, client, log):
        spec = client.spec()
        plugins.require_graders(spec)
        with not_retried():
            require_profiles(spec, root_public_key=role.root_public_key)
        data = problem_files(client, spec, plugins.WeightsLocation.of(role), log)
        with closing(plugins.load_prefill_engine(spec, plugins.WeightsLocation.of(role))) as engine:
            validator = Validator(
                *(spec, key, client, engine),
                task_set_of=partial(plugins.load_task_set, spec, data_dir=data, replays=True),
                log=log,
            )
            who = key.public_hex[:12]
            serve_metrics(role.figures, validator, log)
            log.info("validator %s serves run %s, engine %s", who, spec.name, spec.verify.engine)
            with closing(validator), heartbeats(client, validator, log):
                validator.serve(stop)
