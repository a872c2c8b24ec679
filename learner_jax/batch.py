"""From a signed batch manifest to rollouts: what the learner reads, and how it is checked.

Tokens come from the submission, rewards and mu from the validator's verdict file. Nothing that the
manifest does not name is ever read. A submission that a validator accepted and that cannot be
decoded is an error that names it: a step without one of its groups would be another step.

A worker claims log-probs as its engine computed them; a validator recomputes them with the
learner's own model from the published bits of the version that sampled. Validators reject what is
far off; `Agreement` shows what drifts within their limits and would bias every importance ratio.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal

import numpy as np

from learner_jax.feed import REMEDY as _REMEDY
from learner_jax.feed import ManifestReader, manifest_digest, own_share
from learner_jax.packing import ARRAYS
from runspec.core.canonical import digest_bytes, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.run_files import SubmissionFiles, submission_files
from runspec.core.schema import RunSpec
from runspec.core.signed import BadSignature
from verify.formats import submission as submission_format
from verify.formats import verdict as verdict_format
from verify.formats.batch import BatchGroup, BatchManifest
from verify.formats.tables import MalformedTable
from verify.formats.turns import Joined, joined
from verify.thresholds import LOGPROB_ALARM, precision_of


@dataclass(frozen=True)
class Agreement:
    """|claimed - recomputed| log-prob over the output tokens of a step that were recomputed."""

    tokens: int
    mean: float
    """Nats."""
    largest: float


def agreement(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> Agreement | None:
    """Compares log-probs.

    Args:
        pairs: of each rollout the claimed and the recomputed ones, f32 [n] each.

    Returns:
        None where nothing was recomputed.
    """
    differences = [np.abs(claimed.astype(np.float64) - ours) for claimed, ours in pairs]
    if not differences:
        return None
    every = np.concatenate(differences)
    return Agreement(len(every), float(every.mean()), float(every.max()))


def alarm_limit(spec: RunSpec) -> float:
    """The mean above which a step raises the alarm: `verify.logprob_alarm`, or that of the coarsest
    precision among the pools."""
    if spec.verify.logprob_alarm is not None:
        return spec.verify.logprob_alarm
    return max(LOGPROB_ALARM[precision_of(pool)] for pool in spec.samplers)


MAX_TABLE_BYTES = verdict_format.MAX_BYTES


@dataclass(frozen=True)
class TrainingRollout:
    """One rollout as the learner trains on it."""

    __pydantic_config__ = ARRAYS

    problem_id: str
    prompt_tokens: np.ndarray
    """i32 [P]."""
    output_tokens: np.ndarray
    """i32 [n]: all that follows the prompt, the end token included where there is one."""
    mu: np.ndarray
    """f32 [m]: log-probs of the sampled tokens under the version that sampled them, at the sampling
    temperature."""
    advantage: float
    task_reward: float
    reward: float
    target: int | None
    """Length asked for, in tokens."""
    version: int
    """The policy version that sampled it; the oldest, where several did."""
    own: np.ndarray | None = None
    """bool [n]: the m output tokens that the policy sampled; None: all of them."""

    @property
    def length(self) -> int:
        """m, the length of the rollout for the loss and the metrics."""
        return len(self.mu)


@dataclass(frozen=True)
class Batch:
    """The batch of one step: the manifest, and groups with rollouts in training order."""

    manifest: BatchManifest
    groups: list[list[TrainingRollout]]
    """Groups of the manifest: all, or those of an island's share."""
    agreement: Agreement | None = None
    """Agreement of the samplers' log-probs with ours; None where nothing was recomputed, and on
    processes that read no files."""
    first: int = 0
    """Number of the first of `groups` in the manifest."""

    @property
    def named(self) -> list[BatchGroup]:
        """The manifest's entries of `groups`."""
        return self.manifest.groups[self.first : self.first + len(self.groups)]

    @property
    def rollouts(self) -> list[TrainingRollout]:
        return [rollout for group in self.groups for rollout in group]

    @property
    def digest(self) -> str:
        """Names what the manifest says, whoever signed it when."""
        return manifest_digest(self.manifest)


class BatchReader(ManifestReader[BatchManifest]):
    """Waits for the batch manifests of a run, and reads what they name.

    Args:
        run_dir: the run directory.
        spec: its resolved spec.
        root_public_key: pinned; signs `keys/roles.json`.
        island: whose share is read; None: the whole step.

    Raises:
        UserError: the run's roles cannot be read, or the run is of an older version.
    """

    def __init__(
        self, run_dir: Path, spec: RunSpec, root_public_key: str, island: str | None = None
    ) -> None:
        super().__init__(run_dir, spec, root_public_key)
        self._island = island
        # What a validator accepted has to be read: one that is refused here ends the run.
        self._max_read = max(MAX_TABLE_BYTES, submission_format.largest_submission_bytes(spec))
        self._max_bytes = min(self._max_read, submission_format.largest_accepted_bytes(spec))

    def _check(self, manifest: BatchManifest, path: Path) -> None:
        step, most = manifest.step, self._spec.grpo.async_level
        for group in manifest.groups:
            if not 0 <= step - group.version <= most:
                raise UserError(
                    f"a group of version {group.version} in step {step}: lag "
                    f"{step - group.version}, algorithm.async_level is {most}",
                    place=str(path),
                    remedy="the coordinator is at fault: report this with its log",
                )
        if not manifest.groups:
            raise UserError("it names no group", place=str(path), remedy=_REMEDY)

    def read(self, manifest: BatchManifest) -> Batch:
        """Reads the files that a manifest names, each once, and computes the advantages.

        Raises:
            UserError: a file is missing, is not the one named, cannot be decoded, or does not hold
                the whole group.
        """
        opened: dict[tuple[str, str], dict[int, list[_Row]]] = {}
        groups, compared = [], []
        share = own_share(manifest, self._island)
        for named in manifest.groups[share]:
            key = (named.submission, named.verdict)
            if key not in opened:
                opened[key] = self._open_group(named)
            rows = opened[key].get(named.group, [])
            self._check_group(named, rows)
            groups.append(self._training_group(rows))
            # Claimed and recomputed; none where they were not, or not under one version.
            compared += [
                (row.rollout.logprobs, ours)
                for row in rows
                if (ours := row.verdict.logprobs) is not None
            ]
        return Batch(manifest, groups, agreement(compared), share.start or 0)

    def _open_group(self, named: BatchGroup) -> dict[int, list[_Row]]:
        """The rows of one submission with their verdicts, by group."""
        files = submission_files(self._run_dir, named.step, named.submission)
        run = self._spec.name
        try:
            envelope = submission_format.open_submission(
                read_bounded(files.submission_envelope, submission_format.MAX_ENVELOPE_BYTES)
            )
            signed_verdict = read_bounded(files.verdict_envelope, verdict_format.MAX_ENVELOPE_BYTES)
            judgement = self._judgement(signed_verdict, files)
            table = read_bounded(files.submission, self._max_read)
            verdict_table = read_bounded(files.verdict, MAX_TABLE_BYTES)
            for what, found, expected in (
                ("the submission's run", envelope.run, run),
                ("the submission's step", envelope.step, named.step),
                ("the digest in the submission's envelope", envelope.digest, named.submission),
                ("the submission's digest", digest_bytes(table), named.submission),
                ("the verdict's run", judgement.run, run),
                ("the verdict's step", judgement.step, named.step),
                ("the submission that the verdict is on", judgement.submission, named.submission),
                ("the digest in the verdict's envelope", judgement.digest, named.verdict),
                ("the verdict's digest", digest_bytes(verdict_table), named.verdict),
                ("the verdict's `accepted`", judgement.accepted, True),
            ):
                if found != expected:
                    raise BadSignature(f"{what} is {found!r}, the manifest says {expected!r}")
            verdicts = verdict_format.decode_verdicts(verdict_table)
        except (OSError, BadSignature, MalformedTable) as error:
            raise UserError(str(error), place=str(files.submission), remedy=_REMEDY) from error
        try:
            rollouts = submission_format.decode_rollouts(
                table, max_rows=verdict_format.MAX_ROWS, max_bytes=self._max_bytes
            )
        except MalformedTable as error:
            validator = parse_object(signed_verdict, max_bytes=len(signed_verdict))["key"]
            raise UserError(
                f"submission {named.submission[:16]} of step {named.step} was accepted by "
                f"validator {validator[:12]}, and cannot be decoded: {error}",
                place=str(files.submission),
                remedy="that validator is wrong, bribed or of another release: mend or remove it, "
                f"`runspec ban {run} {envelope.worker[:12]}` who sent it, `runspec rollback {run} "
                f"--to {named.step}` or further back, then `runspec resume {run}`",
            ) from error
        by_group: dict[int, list[_Row]] = {}
        for verdict in verdicts:
            if verdict.group in judgement.dropped_groups:
                continue
            if not 0 <= verdict.row < len(rollouts):
                raise UserError(
                    f"row {verdict.row} of {len(rollouts)}",
                    place=str(files.verdict),
                    remedy=_REMEDY,
                )
            by_group.setdefault(verdict.group, []).append(_Row(rollouts[verdict.row], verdict))
        return by_group

    def _judgement(self, signed: bytes, files: SubmissionFiles) -> verdict_format.VerdictEnvelope:
        """The envelope of a verdict, by the roles as they are now: validators may be added."""
        try:
            return verdict_format.open_verdict(signed, validators=self.roles.validator)
        except BadSignature:
            self.roles = self._read_roles()
        try:
            return verdict_format.open_verdict(signed, validators=self.roles.validator)
        except BadSignature as error:
            raise UserError(
                str(error),
                place=str(files.verdict_envelope),
                remedy=f"{_REMEDY}; keys/roles.json must name whoever judged what is to be trained",
            ) from error

    def _check_group(self, named: BatchGroup, rows: list[_Row]) -> None:
        """A whole group: every sample once, each of the version named, verdict beside rollout."""
        samples = sorted(row.rollout.sample for row in rows)
        whole = samples == list(range(self._spec.grpo.group_size))
        if not whole or not all(row.belongs_to(named) for row in rows):
            raise UserError(
                f"group {named.group} is not whole: samples {samples} with verdicts, "
                f"{self._spec.grpo.group_size} expected, all of version {named.version}",
                place=str(submission_files(self._run_dir, named.step, named.submission).submission),
                remedy=_REMEDY,
            )

    def _training_group(self, rows: list[_Row]) -> list[TrainingRollout]:
        rows = sorted(rows, key=lambda row: row.rollout.sample)
        advantages = group_advantages(
            reward=np.array([row.verdict.reward for row in rows]),
            task_reward=np.array([row.verdict.task_reward for row in rows]),
            length_penalty=np.array([row.verdict.length_penalty for row in rows]),
            normalize=self._spec.grpo.advantage.normalize,
        )
        return [
            TrainingRollout(
                problem_id=row.rollout.problem_id,
                # Copies: decoded arrays are views that keep the whole submission.
                prompt_tokens=row.rollout.prompt_tokens.copy(),
                output_tokens=sequence.tokens.copy(),
                mu=row.mu.copy(),
                advantage=advantage,
                task_reward=row.verdict.task_reward,
                reward=row.verdict.reward,
                target=row.verdict.target,
                version=row.rollout.oldest_version,
                own=sequence.own,
            )
            for row, advantage in zip(rows, advantages.tolist(), strict=True)
            for sequence in [row.sequence()]
        ]


@dataclass(frozen=True)
class _Row:
    rollout: submission_format.Rollout
    verdict: verdict_format.RolloutVerdict

    def belongs_to(self, named: BatchGroup) -> bool:
        verdict, rollout, length = self.verdict, self.rollout, len(self.rollout.output_tokens)
        return (
            verdict.submission == named.submission
            and rollout.group == named.group
            and rollout.version == named.version
            and verdict.length == length > 0
            and len(self.mu) == length
            and bool(np.isfinite(self.mu).all())
            and self._fits()
            and all(map(isfinite, (verdict.task_reward, verdict.length_penalty, verdict.reward)))
        )

    def sequence(self) -> Joined:
        """Return the rollout's turns with what stands between them.

        Raises:
            ValueError: the lengths in submission and verdict do not fit.
        """
        rollout, verdict = self.rollout, self.verdict
        lengths = verdict.between_lengths
        return joined(rollout.output_tokens, rollout.turns, verdict.between, lengths)

    def _fits(self) -> bool:
        try:
            self.sequence()
        except ValueError:
            return False
        return True

    @property
    def mu(self) -> np.ndarray:
        # Where `verify.prefill_share` left the prefill out, the worker's claim is all there is.
        return self.rollout.logprobs if self.verdict.logprobs is None else self.verdict.logprobs


EPS = 1e-6
_EPS_F32 = 2.0**-23


def group_advantages(
    task_reward: np.ndarray,
    length_penalty: np.ndarray,
    reward: np.ndarray,
    *,
    normalize: Literal["std", "task", "none"],
) -> np.ndarray:
    """Advantages inside each group; R reward, T task reward, P length term, std with ddof 1.

        std    (R - mean R) / (std R + 1e-6)
        none   R - mean R
        task   (T - mean T) / (std T + 1e-6) + (P - mean P), where R = T + P: the length keeps its
               scale, and noise in it is never divided up to unit advantages

    `std` is GRPO's (arXiv 2402.03300, section 4.1.1), `none` that of arXiv 2503.20783.

    Args:
        task_reward, length_penalty, reward: [..., group size].
        normalize: as above.

    Returns:
        float64 of the same shape; the mean over each group is 0.

    Raises:
        ValueError: a group of one, whose std is undefined; or `task` where R is not T + P.
    """
    reward, task_reward, length_penalty = (
        np.asarray(x, np.float64) for x in (reward, task_reward, length_penalty)
    )
    if reward.shape[-1] < 2:
        raise ValueError("a group needs at least two rollouts to have an advantage")
    if normalize == "none":
        return _centred(reward)
    if normalize == "std":
        return _standardised(reward)
    # Verdict files round each to float32 by itself.
    rounding = _EPS_F32 * (abs(reward) + abs(task_reward) + abs(length_penalty))
    if not (abs(reward - task_reward - length_penalty) <= 1e-5 + rounding).all():
        raise ValueError("`task` advantages need rewards that are task reward + length term")
    return _standardised(task_reward) + _centred(length_penalty)


def _centred(x: np.ndarray) -> np.ndarray:
    return x - x.mean(axis=-1, keepdims=True)


def _standardised(x: np.ndarray) -> np.ndarray:
    return _centred(x) / (x.std(axis=-1, ddof=1, keepdims=True) + EPS)
