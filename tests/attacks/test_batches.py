"""Files exchanged or changed between the verdict and the learner: on its disk, or on the way.

The learner trains what the signed manifest names and nothing else, compares every digest, and takes
rewards and log-probs from the verdict files. What a validator accepted and should not have ends it
with an error that names the file. Other damage of single files: `tests/learner_jax/test_batch.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from learner_jax.batch import Batch, BatchReader
from runspec.core.errors import UserError
from runspec.core.run_files import SubmissionFiles, step_folder, submission_files
from tests.learner_jax.conftest import Run, tiny_spec
from verify.formats.batch import BatchGroup
from verify.formats.submission import Rollout, decode_rollouts, encode_rollouts, sign_submission
from verify.formats.verdict import decode_verdicts, encode_verdicts


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Step 0 is there to be trained, and was read once as it should be."""
    run = Run(tmp_path / "run", tiny_spec())
    run.add_step(0, version=0)
    assert len(read(run).rollouts) == 16
    return run


def read(run: Run) -> Batch:
    reader = BatchReader(run.path, run.spec, run.root.public_hex)
    return reader.read(reader.manifest(0))


def refused(run: Run, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read(run)
    assert "rollouts/step_0/" in caught.value.place


def named(run: Run) -> list[BatchGroup]:
    return BatchReader(run.path, run.spec, run.root.public_hex).manifest(0).groups


def files_of(run: Run) -> SubmissionFiles:
    return submission_files(run.path, 0, named(run)[0].submission)


def rows_of(run: Run) -> list[Rollout]:
    return decode_rollouts(files_of(run).submission.read_bytes(), max_rows=99, max_bytes=10**6)


class TestExchangedFile:
    """Another file under the name of one that the manifest names."""

    def test_files_of_another_accepted_submission(self, run: Run) -> None:
        # given a submission beside those of the step, as good but not in its manifest
        digest, _ = run.add_submission(0, [replace(r, problem_id="easier") for r in rows_of(run)])
        other, files, alone = submission_files(run.path, 0, digest), files_of(run), read(run)
        for names, words in (
            (["submission", "verdict"], "the submission's digest is"),
            (["submission_envelope", "verdict_envelope"], "digest"),
        ):
            for name in names:
                getattr(files, name).write_bytes(getattr(other, name).read_bytes())
            refused(run, words)
        # what is beside those named is not read
        run.add_step(0, version=0)
        for path in (other.submission, other.verdict, other.verdict_envelope):
            path.write_bytes(b"a submission that crashes what reads it")
        assert [r.reward for r in read(run).rollouts] == [r.reward for r in alone.rollouts]


class TestExchangedManifest:
    """Another manifest in the place of the step's: only the coordinator's word for it counts."""

    def test_of_a_worker_a_validator_another_step_or_run(self, run: Run, tmp_path: Path) -> None:
        path, groups = step_folder(run.path, 0) / "batch.json", named(run)
        data = path.read_bytes()
        for key in (run.worker, run.validator):
            run.add_batch(0, groups[:1], key=key)
            refused(run, "may not sign")
        for step, name, words in ((1, "tiny", "step"), (0, "another", "run")):
            of_another = tmp_path / f"of another {words}"  # of the same keys
            other = replace(run, path=of_another, spec=tiny_spec(name=name))
            other.add_step(step, version=0)
            path.write_bytes((step_folder(other.path, step) / "batch.json").read_bytes())
            refused(run, words)
        path.write_bytes(data.replace(b'"group":3', b'"group":2'))
        refused(run, "signature does not match")


class TestTamperedAfterTheVerdict:
    """Rewards and log-probs that are changed once they were checked."""

    def test_claims_of_the_submission_train_nothing(self, run: Run) -> None:
        # given a submission that claims a reward of 2 and -3.5 a token, and verdicts that do not
        batch = read(run)
        assert {rollout.task_reward for rollout in batch.rollouts} == {0.0, 1.0}
        assert all((rollout.mu == np.float32(-3.4)).all() for rollout in batch.rollouts)
        # then advantages are of the verdicts' rewards too
        group = batch.groups[0]
        mean = np.mean([rollout.reward for rollout in group])
        assert [r.advantage for r in group] == pytest.approx([r.reward - mean for r in group])

    @pytest.mark.parametrize("what", ["rewards", "log-probs"])
    def test_a_verdict_written_anew(self, run: Run, what: str) -> None:
        files, submission = files_of(run), named(run)[0].submission
        old = decode_verdicts(files.verdict.read_bytes())
        if what == "rewards":
            table = encode_verdicts([replace(v, reward=100.0, task_reward=100.0) for v in old])
        else:
            table = encode_verdicts([replace(v, logprobs=v.logprobs - 5) for v in old])
        # when the table is exchanged, alone or with an envelope of whoever has a key
        files.verdict.write_bytes(table)
        refused(run, "the verdict's digest is")
        for key, words in (
            (run.coordinator, "may not sign"),
            (run.validator, "the digest in the verdict's envelope"),  # even a validator's own
        ):
            run.file_verdict(0, submission, table, key=key)
            refused(run, words)

    def test_a_submission_written_anew(self, run: Run) -> None:
        """Other tokens under the verdict of the old ones, signed by the worker again."""
        files, said = files_of(run), {"step": 0, "index": 0, "lease": "0" * 64}
        edited = [replace(r, output_tokens=r.output_tokens[::-1].copy()) for r in rows_of(run)]
        table = encode_rollouts(edited)
        files.submission.write_bytes(table)
        envelope = sign_submission(table, run=run.spec.name, **said, key=run.worker)
        files.submission_envelope.write_bytes(envelope)
        refused(run, "the digest in the submission's envelope")


class TestPoisonThatWasAccepted:
    """A validator, bribed or wrong, let a file through that is no table."""

    @pytest.mark.parametrize(
        ("file", "words"),
        [
            (encode_rollouts([])[:-1], r"\d+ bytes, its counts give"),
            (b"\xff" * 1000, "shorter than its header"),
            (encode_verdicts([]), "the header is not that of a runspec submission"),
            (b"PAR1" * 100, "a Parquet file of an older version"),
            (bytes(1 << 20), r"1048576 bytes, more than the \d+ allowed"),
        ],
        ids=["cut", "lying", "verdict", "older", "large"],
    )
    def test_the_learner_names_it_and_who_let_it_through(
        self, run: Run, file: bytes, words: str
    ) -> None:
        # given a submission that is poison, accepted and named by the signed manifest of step 0
        good = named(run)
        digest = run.accept(0, good, file)
        # when the learner reads the step
        with pytest.raises(UserError, match=words) as caught:
            read(run)
        # then it says which file it is, who sent it, who accepted it, and what to do
        error = caught.value
        assert f"submission {digest[:16]} of step 0" in error.thing
        assert f"validator {run.validator.public_hex[:12]}" in error.thing
        assert error.place == str(submission_files(run.path, 0, digest).submission)
        assert f"runspec ban tiny {run.worker.public_hex[:12]}" in error.remedy
        assert "runspec rollback tiny --to 0" in error.remedy
        # and it is alive: the step is read where the file is not in it
        run.add_batch(0, good)
        assert len(read(run).rollouts) == 16
