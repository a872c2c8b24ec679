"""What the learner reads of a step: all that the manifest names, checked, and nothing else.

And how it waits for the manifest, and gives the batch to its other processes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner_jax.batch import Batch, BatchReader, TrainingRollout, alarm_limit
from learner_jax.feed import ManifestReader, decode, encode, manifest_digest
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.run_files import step_folder, submission_files
from runspec.core.signed import SigningKey
from tests.learner_jax.conftest import Run
from tests.verify.coordinator.documents import ROWS, documents_spec
from verify.formats.batch import BatchGroup, BatchManifest, RangeManifest, RowRange, sign_ranges
from verify.formats.submission import (
    decode_rollouts,
    encode_rollouts,
    largest_submission_bytes,
    sign_submission,
)
from verify.formats.verdict import decode_verdicts, encode_verdicts

LOG = logging.getLogger("test")


def reader_of(run: Run) -> BatchReader:
    return BatchReader(run.path, run.spec, run.root.public_hex)


def read(run: Run) -> Batch:
    """Step 0, by a reader of its own."""
    reader = reader_of(run)
    return reader.read(reader.manifest(0))


def verdicts_on(run: Run, named: list[BatchGroup]) -> bytes:
    return submission_files(run.path, 0, named[0].submission).verdict.read_bytes()


def test_tokens_come_from_the_submission_rewards_and_mu_from_the_verdict(run):
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
    # and of two groups that a manifest names, those in its order
    run.add_batch(0, [named[3], named[1]])
    assert [group[0].problem_id for group in read(run).groups] == ["p3", "p1"]


def test_mu_of_rollouts_that_were_prefilled_is_compared_with_the_workers(run):
    # given a step whose workers claim -3.5 for every token
    named = run.add_step(0, version=0)
    verdicts = decode_verdicts(verdicts_on(run, named))
    off = np.abs(-3.5 - np.concatenate([verdict.logprobs for verdict in verdicts]))
    # when the learner reads it, then it has the mean and the largest distance on the same tokens
    found = read(run).agreement
    assert found is not None and found.tokens == len(off)
    assert (found.mean, found.largest) == pytest.approx((off.mean(), off.max()))
    assert found.mean > alarm_limit(run.spec)
    # and those that were not prefilled carry the worker's, with nothing to compare it with
    without = [replace(verdict, logprobs=None, logprob_diff=None) for verdict in verdicts]
    refile_verdict(run, named, encode_verdicts(without))
    batch = read(run)
    assert batch.rollouts[0].mu[0] == np.float32(-3.5) and batch.agreement is None


def test_whatever_a_pool_may_hand_in_is_read(run, monkeypatch):
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


def refile_verdict(run: Run, named: list[BatchGroup], table: bytes, **how: Any) -> None:
    """Files another verdict on the same submission and signs a manifest that names it."""
    run.file_verdict(0, named[0].submission, table, **how)
    run.add_batch(0, [replace(group, verdict=digest_bytes(table)) for group in named])


def with_rows(change: Callable[[list[Any]], list[Any]]) -> Callable[[Run, list[BatchGroup]], None]:
    """Files the verdict with other rows."""

    def refile(run: Run, named: list[BatchGroup]) -> None:
        rows = decode_verdicts(verdicts_on(run, named))
        refile_verdict(run, named, encode_verdicts(change(rows)))

    return refile


def test_turns_are_joined_by_what_the_verdict_puts_between_them(run):
    # given a step whose rollouts have two turns, the first of one token
    named = run.add_step(0, version=0)
    files = submission_files(run.path, 0, named[0].submission)
    rows = decode_rollouts(files.submission.read_bytes(), max_rows=99, max_bytes=10**6)
    turns = [np.array([1, len(row.output_tokens) - 1], np.int32) for row in rows]
    table = encode_rollouts([replace(r, turns=t) for r, t in zip(rows, turns, strict=True)])
    named = [replace(group, submission=run.accept(0, named, table)) for group in named]

    def put_between(tokens: list[int] | None, lengths: list[int] | None) -> None:
        fields = {"between": tokens, "between_lengths": lengths}
        with_rows(lambda verdicts: [replace(each, **fields) for each in verdicts])(run, named)

    # when the verdict has nothing between them, or lengths that do not fit, then it is refused
    for tokens, lengths in ((None, None), ([7, 8], [1]), ([7, 8], [1, 1])):
        put_between(tokens, lengths)
        with pytest.raises(UserError, match="not whole"):
            read(run)
    # and when it fits, then its tokens stand in the sequence and are not the policy's
    put_between([7, 8], [2])
    for rollout, row in zip(read(run).rollouts, rows, strict=True):
        first, *rest = row.output_tokens.tolist()
        assert rollout.output_tokens.tolist() == [first, 7, 8, *rest]
        assert rollout.own.tolist() == [True, False, False, *[True] * len(rest)]
        assert rollout.length == len(rollout.mu) == len(row.output_tokens)


def verdict_on_another(run: Run, named: list[BatchGroup]) -> None:
    files = submission_files(run.path, 0, named[0].submission)
    rows = decode_rollouts(files.submission.read_bytes(), max_rows=99, max_bytes=10**6)
    other, _ = run.add_submission(0, [replace(row, problem_id="another") for row in rows])
    others = submission_files(run.path, 0, other)
    files.verdict.write_bytes(others.verdict.read_bytes())
    files.verdict_envelope.write_bytes(others.verdict_envelope.read_bytes())


def envelope_of_another_run(run: Run, named: list[BatchGroup]) -> None:
    files = submission_files(run.path, 0, named[0].submission)
    said = {"run": "other", "step": 0, "index": 0, "lease": "0" * 64}
    envelope = sign_submission(files.submission.read_bytes(), **said, key=run.worker)
    files.submission_envelope.write_bytes(envelope)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda r, named: refile_verdict(r, named, verdicts_on(r, named), accepted=False), "accep"),
        (verdict_on_another, "submission that the verdict is on"),
        (with_rows(lambda rows: rows[1:]), "not whole"),
        (with_rows(lambda rows: [rows[0], rows[0], *rows[2:]]), "not whole"),
        (with_rows(lambda r: [replace(r[0], length_penalty=np.nan), *r[1:]]), "not whole"),
        (envelope_of_another_run, "submission's run"),
        (lambda r, n: submission_files(r.path, 0, n[0].submission).submission.unlink(), "No such"),
    ],
)
def test_files_that_are_not_what_the_manifest_names_are_refused(run, damage, word):
    # given a good step, one thing of it damaged; exchanged files are in tests/attacks
    damage(run, run.add_step(0, version=0))
    # when it is read, then the error names the submission and what is wrong with it
    with pytest.raises(UserError, match=word) as caught:
        read(run)
    assert "rollouts/step_0/" in caught.value.place


def test_the_roles_of_now_say_who_may_judge_and_sign(run):
    # given a learner that is at work, and a step that was judged
    named, reader = run.add_step(0, version=0), reader_of(run)
    judged = verdicts_on(run, named)
    # when the root names another validator instead
    run.validator = SigningKey.generate()
    run.sign_roles()
    # then what the one before judged is trained no more
    with pytest.raises(UserError, match="may not sign") as caught:
        read(run)
    assert caught.value.place.endswith(".verdict.json")
    assert "keys/roles.json" in caught.value.remedy
    # and what the new one judges is, though the learner began before
    refile_verdict(run, named, judged)
    assert len(reader.read(reader.manifest(0)).rollouts) == 16
    # and a manifest of a stranger is not believed
    run.add_batch(0, named, key=SigningKey.generate())
    with pytest.raises(UserError, match="may not sign"):
        reader.manifest(0)


def test_lag_beyond_the_async_level_or_below_zero_is_refused(run):
    groups = run.add_step(4, version=4)
    for version in (1, 2, 4, 5):
        run.add_batch(4, [replace(group, version=version) for group in groups])
        if version in (2, 4):
            assert reader_of(run).manifest(4).step == 4
            continue
        with pytest.raises(UserError, match="lag"):
            reader_of(run).manifest(4)


class Meanwhile(threading.Event):
    """While somebody waits, something happens."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self._action = action

    def wait(self, timeout: float | None = None) -> bool:
        self._action()
        return self.is_set()


def test_waiting_ends_when_the_manifest_appears_or_the_role_is_told_to_stop(run):
    reader = reader_of(run)
    stop = Meanwhile(lambda: run.add_step(0, version=0))
    manifest = reader.wait(0, stop, LOG)
    assert manifest is not None and manifest.step == 0
    # given that it is told to stop while it waits, or was before
    stop = Meanwhile(lambda: stop.set())
    assert reader.wait(1, stop, LOG) is None
    assert reader.wait(0, stop, LOG) is None


def test_a_run_on_documents_waits_for_rows_and_believes_the_coordinator_alone(tmp_path):
    run = Run(tmp_path / "run", documents_spec())
    reader = ManifestReader[RangeManifest](run.path, run.spec, run.root.public_hex)

    def sign(step: int, *, rows: int = ROWS, key: SigningKey = run.coordinator) -> None:
        made = RangeManifest(run.spec.name, step, RowRange.of_step(step, rows), 7, "ab" * 32)
        folder = step_folder(run.path, step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "batch.json").write_bytes(sign_ranges(made, key))

    found = reader.wait(2, Meanwhile(lambda: sign(2)), LOG)
    assert found is not None and found.rows == RowRange(12, 18)
    assert manifest_digest(found) == manifest_digest(reader.manifest(2, signed=False))
    # given what is a stranger's, of other rows, or nothing of that kind
    sign(0, key=SigningKey.generate())
    with pytest.raises(UserError, match=r"step_0.*batch\.json"):
        reader.manifest(0)
    assert reader.manifest(0, signed=False).step == 0  # as after a rollback
    sign(0, rows=ROWS + 1)
    with pytest.raises(UserError, match="rows 0 to 7 in step 0, which has 0 to 6"):
        reader.manifest(0)
    (step_folder(run.path, 0) / "batch.json").write_bytes(b"{}")
    with pytest.raises(UserError, match="ranges"):
        reader.manifest(0)


finite = st.floats(allow_nan=False, allow_infinity=False)
single = st.floats(allow_nan=False, allow_infinity=False, width=32)
tokens = st.lists(st.integers(0, 2**31 - 1), min_size=0, max_size=5)


@st.composite
def rollouts(draw: Any) -> TrainingRollout:
    output = draw(tokens)
    mu = draw(st.lists(single, min_size=len(output), max_size=len(output)))
    return TrainingRollout(
        problem_id=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
        prompt_tokens=np.asarray(draw(tokens), np.int32),
        output_tokens=np.asarray(output, np.int32),
        mu=np.asarray(mu, np.float32),
        advantage=draw(finite),
        task_reward=draw(finite),
        reward=draw(finite),
        target=draw(st.none() | st.integers(0, 2**31 - 1)),
        version=draw(st.integers(0, 99)),
        own=draw(st.sampled_from([None, np.arange(len(output)) % 2 == 0])),
    )


@st.composite
def batches(draw: Any) -> Batch:
    groups = draw(st.lists(st.lists(rollouts(), min_size=1, max_size=3), min_size=1, max_size=3))
    named = [BatchGroup(f"{i:064x}", "b" * 64, i, 5, 4) for i in range(len(groups))]
    stats = {"task_reward_mean": draw(finite), "by_target": {"8": 1.5}}
    return Batch(BatchManifest("run", 5, named, True, stats, 1, "0" * 64), groups)


def same(a: TrainingRollout, b: TrainingRollout) -> bool:
    return all(
        x.tobytes() == y.tobytes() and x.dtype == y.dtype if isinstance(x, np.ndarray) else x == y
        for x, y in zip(astuple(a), astuple(b), strict=True)
    )


@settings(derandomize=True, max_examples=50, deadline=None)
@given(batches(), st.data())
def test_a_batch_goes_to_other_processes_bit_for_bit_and_nothing_else_passes_for_one(batch, data):
    whole = encode(batch)
    back = decode(whole, Batch)
    assert back.manifest == batch.manifest and back.digest == batch.digest
    assert [len(group) for group in back.groups] == [len(group) for group in batch.groups]
    assert all(same(a, b) for a, b in zip(back.rollouts, batch.rollouts, strict=True))
    cut = data.draw(st.integers(0, len(whole) - 1))
    for damaged in (whole[:cut], whole + b"\0"):
        with pytest.raises((ValueError, TypeError)):
            decode(damaged, Batch)
