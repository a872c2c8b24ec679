"""What the learner reads of a step: all that the manifest names, checked, and nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner_jax.agreement import alarm_limit
from learner_jax.batch import Batch, BatchReader
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from runspec.core.run_files import submission_files
from verify.formats.batch import BatchGroup
from verify.formats.submission import (
    decode_rollouts,
    encode_rollouts,
    largest_submission_bytes,
    sign_submission,
)
from verify.formats.verdict import decode_verdicts, encode_verdicts

LOG = logging.getLogger("test")


def reader_of(run: Any) -> BatchReader:
    return BatchReader(run.path, run.spec, run.root.public_hex)


def read(run: Any) -> Batch:
    """Step 0, by a reader of its own."""
    reader = reader_of(run)
    return reader.read(reader.manifest(0))


def verdicts_on(run: Any, named: list[BatchGroup]) -> bytes:
    return submission_files(run.path, 0, named[0].submission).verdict.read_bytes()


def test_tokens_come_from_the_submission_rewards_and_mu_from_the_verdict(run: Any) -> None:
    # given a step whose verdicts disagree with the worker's claims
    named = run.add_step(0, version=0)
    files = submission_files(run.path, 0, named[0].submission)
    rows = decode_rollouts(files.submission.read_bytes(), max_rows=99, max_bytes=10**6)
    verdicts = decode_verdicts(files.verdict.read_bytes())
    # when the learner reads it
    batch = read(run)
    # then every rollout has the submission's tokens and the verdict's numbers, in order
    assert [len(group) for group in batch.groups] == [4, 4, 4, 4]
    for rollout, row, verdict in zip(batch.rollouts, rows, verdicts, strict=True):
        np.testing.assert_array_equal(rollout.output_tokens, row.output_tokens)
        np.testing.assert_array_equal(rollout.mu, verdict.logprobs)
        assert rollout.reward == verdict.reward != row.task_reward + row.length_penalty
    # and advantages are the reward's distance from its group's mean
    group = batch.groups[2]
    mean = np.mean([rollout.reward for rollout in group])
    assert [r.advantage for r in group] == pytest.approx([r.reward - mean for r in group])


def test_the_order_is_the_manifests_not_the_files(run: Any) -> None:
    named = run.add_step(0, version=0)
    run.add_batch(0, [named[3], named[1]])
    assert [group[0].problem_id for group in read(run).groups] == ["p3", "p1"]


def test_a_submission_that_no_manifest_names_is_not_opened(run: Any) -> None:
    # given a step, and beside its files a submission and a verdict of garbage
    run.add_step(0, version=0)
    alone = read(run)
    stranger = submission_files(run.path, 0, "ab" * 32)
    for path in (stranger.submission, stranger.submission_envelope, stranger.verdict):
        path.write_bytes(b"not a submission")
    # when the step is read, then it is what it was without them
    batch = read(run)
    assert [len(group) for group in batch.groups] == [4, 4, 4, 4]
    for found, expected in zip(batch.rollouts, alone.rollouts, strict=True):
        np.testing.assert_array_equal(found.output_tokens, expected.output_tokens)
        np.testing.assert_array_equal(found.mu, expected.mu)
        assert (found.reward, found.advantage) == (expected.reward, expected.advantage)


def test_rollouts_that_were_not_prefilled_carry_the_workers_mu(run: Any) -> None:
    named = run.add_step(0, version=0)
    verdicts = decode_verdicts(verdicts_on(run, named))
    without = [replace(verdict, logprobs=None, logprob_diff=None) for verdict in verdicts]
    refile_verdict(run, named, encode_verdicts(without))
    batch = read(run)
    assert batch.rollouts[0].mu[0] == np.float32(-3.5)
    # and there is nothing to compare it with
    assert batch.agreement is None


def test_falsified_log_probs_show_as_the_distance_from_those_recomputed(run: Any) -> None:
    # given a step whose workers claim -3.5 for every token
    named = run.add_step(0, version=0)
    verdicts = decode_verdicts(verdicts_on(run, named))
    ours = np.concatenate([verdict.logprobs for verdict in verdicts])
    # when the learner reads it
    found = read(run).agreement
    # then it has the mean and the largest distance on the same tokens
    assert found is not None
    assert found.tokens == len(ours)
    assert found.mean == pytest.approx(np.abs(-3.5 - ours).mean())
    assert found.largest == pytest.approx(np.abs(-3.5 - ours).max())
    assert found.mean > alarm_limit(run.spec)


def test_whatever_a_pool_may_hand_in_is_read(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a pool whose submissions may be larger than the learner takes of any run
    (pool,) = run.spec.samplers
    large = pool.model_copy(update={"groups_per_submission": 4})
    run.spec = run.spec.model_copy(update={"samplers": [large]})
    named = run.add_step(0, version=0)
    monkeypatch.setattr("learner_jax.batch.MAX_TABLE_BYTES", 60_000)
    most = largest_submission_bytes(run.spec)
    # when a worker makes the most of that
    files = submission_files(run.path, 0, named[0].submission)
    rows = decode_rollouts(files.submission.read_bytes(), max_rows=16, max_bytes=most)
    rows[0] = replace(rows[0], problem_id="x" * (most - files.submission.stat().st_size - 99))
    table = encode_rollouts(rows)
    assert 60_000 < len(table) <= most
    run.accept(0, named, table)
    # then it trains
    assert len(read(run).rollouts) == 16


def refile_verdict(run: Any, named: list[BatchGroup], table: bytes, **how: Any) -> None:
    """Files another verdict on the same submission and signs a manifest that names it."""
    run.file_verdict(0, named[0].submission, table, **how)
    run.add_batch(0, [replace(group, verdict=digest_bytes(table)) for group in named])


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edited_submission(run: Any, named: list[BatchGroup]) -> None:
    flip_a_byte(submission_files(run.path, 0, named[0].submission).submission)


def edited_verdict(run: Any, named: list[BatchGroup]) -> None:
    flip_a_byte(submission_files(run.path, 0, named[0].submission).verdict)


def rejected(run: Any, named: list[BatchGroup]) -> None:
    refile_verdict(run, named, verdicts_on(run, named), accepted=False)


def signed_by_a_worker(run: Any, named: list[BatchGroup]) -> None:
    refile_verdict(run, named, verdicts_on(run, named), key=run.worker)


def verdict_on_another(run: Any, named: list[BatchGroup]) -> None:
    other, _ = run.add_submission(0, other_rollouts(run, named))
    files, others = (submission_files(run.path, 0, d) for d in (named[0].submission, other))
    files.verdict.write_bytes(others.verdict.read_bytes())
    files.verdict_envelope.write_bytes(others.verdict_envelope.read_bytes())


def other_rollouts(run: Any, named: list[BatchGroup]) -> list[Any]:
    files = submission_files(run.path, 0, named[0].submission)
    rows = decode_rollouts(files.submission.read_bytes(), max_rows=99, max_bytes=10**6)
    return [replace(row, problem_id="another") for row in rows]


def half_a_group(run: Any, named: list[BatchGroup]) -> None:
    refile_verdict(run, named, encode_verdicts(decode_verdicts(verdicts_on(run, named))[1:]))


def sample_twice(run: Any, named: list[BatchGroup]) -> None:
    first, _, *rest = decode_verdicts(verdicts_on(run, named))
    refile_verdict(run, named, encode_verdicts([first, first, *rest]))


def no_number(run: Any, named: list[BatchGroup]) -> None:
    first, *rest = decode_verdicts(verdicts_on(run, named))
    refile_verdict(run, named, encode_verdicts([replace(first, length_penalty=np.nan), *rest]))


def envelope_of_another_run(run: Any, named: list[BatchGroup]) -> None:
    files = submission_files(run.path, 0, named[0].submission)
    files.submission_envelope.write_bytes(
        sign_submission(
            files.submission.read_bytes(), run="other", step=0, index=0, lease="0" * 64,
            key=run.worker,
        )
    )  # fmt: skip


def missing(run: Any, named: list[BatchGroup]) -> None:
    submission_files(run.path, 0, named[0].submission).submission.unlink()


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (edited_submission, "submission's digest"),
        (edited_verdict, "verdict's digest"),
        (rejected, "accepted"),
        (signed_by_a_worker, "may not sign"),
        (verdict_on_another, "submission that the verdict is on"),
        (half_a_group, "not whole"),
        (sample_twice, "not whole"),
        (no_number, "not whole"),
        (envelope_of_another_run, "submission's run"),
        (missing, "No such file"),
    ],
)
def test_files_that_are_not_what_the_manifest_names_are_refused(
    run: Any, damage: Callable[[Any, list[BatchGroup]], None], word: str
) -> None:
    # given a good step, one thing of it damaged
    damage(run, run.add_step(0, version=0))
    # when it is read, then the error names the submission and what is wrong with it
    with pytest.raises(UserError, match=word) as caught:
        read(run)
    assert "rollouts/step_0/" in caught.value.place


def test_a_validator_that_was_named_after_the_learner_began_counts(run: Any) -> None:
    # given a learner that is at work
    named, reader = run.add_step(0, version=0), reader_of(run)
    # when the root names another validator, and that one judges
    run.validator = SigningKey.generate()
    run.sign_roles()
    refile_verdict(run, named, verdicts_on(run, named))
    # then what it judged is trained
    assert len(reader.read(reader.manifest(0)).rollouts) == 16


def test_a_verdict_whose_validator_is_named_no_more_says_so(run: Any) -> None:
    run.add_step(0, version=0)
    run.validator = SigningKey.generate()
    run.sign_roles()
    with pytest.raises(UserError, match="may not sign") as caught:
        read(run)
    assert caught.value.place.endswith(".verdict.json")
    assert "keys/roles.json" in caught.value.remedy


def test_a_manifest_counts_only_with_the_coordinators_signature(run: Any) -> None:
    run.add_batch(0, run.add_step(0, version=0), key=SigningKey.generate())
    with pytest.raises(UserError, match="may not sign"):
        reader_of(run).manifest(0)


@pytest.mark.parametrize("version", [0, 5])
def test_lag_beyond_the_async_level_or_below_zero_is_refused(run: Any, version: int) -> None:
    run.add_batch(4, [replace(group, version=version) for group in run.add_step(4, version=4)])
    with pytest.raises(UserError, match="lag"):
        reader_of(run).manifest(4)


def test_waiting_ends_when_the_manifest_appears_or_the_role_is_told_to_stop(run: Any) -> None:
    stop, reader = threading.Event(), reader_of(run)
    timer = threading.Timer(0.1, run.add_step, args=(0,), kwargs={"version": 0})
    timer.start()
    manifest = reader.wait(0, stop, LOG)
    timer.join()
    assert manifest is not None and manifest.step == 0
    stop.set()
    assert reader.wait(0, stop, LOG) is None
    assert reader.wait(1, stop, LOG) is None
