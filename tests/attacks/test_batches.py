"""Files exchanged or changed between the verdict and the learner: on its disk, or on the way.

The learner trains what the signed manifest names and nothing else, compares every digest, and takes
rewards and log-probs from the verdict files. What a validator accepted and should not have ends it
with an error that names the file, and with nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from learner_jax.batch import Batch, BatchReader
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.run_files import SubmissionFiles, step_folder, submission_files
from tests.learner_jax.conftest import Run, tiny_spec
from verify.formats.batch import BatchGroup
from verify.formats.submission import decode_rollouts, encode_rollouts, sign_submission
from verify.formats.verdict import decode_verdicts, encode_verdicts


def reader_of(run: Run) -> BatchReader:
    return BatchReader(run.path, run.spec, run.root.public_hex)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Step 0 is there to be trained, and was read once as it should be."""
    run = Run(tmp_path / "run", tiny_spec())
    run.add_step(0, version=0)
    assert len(read(run).rollouts) == 16
    return run


def read(run: Run, step: int = 0) -> Batch:
    reader = reader_of(run)
    return reader.read(reader.manifest(step))


def named(run: Run, step: int = 0) -> list[BatchGroup]:
    return reader_of(run).manifest(step).groups


def files_of(run: Run, step: int = 0) -> SubmissionFiles:
    return submission_files(run.path, step, named(run, step)[0].submission)


def refused(run: Run, words: str, step: int = 0) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read(run, step)
    assert f"rollouts/step_{step}/" in caught.value.place


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def another_submission(run: Run, step: int = 0) -> tuple[SubmissionFiles, bytes]:
    """A submission and verdict beside those of the step, as good but not in its manifest."""
    rows = decode_rollouts(files_of(run).submission.read_bytes(), max_rows=99, max_bytes=10**6)
    digest, _ = run.add_submission(step, [replace(r, problem_id="easier") for r in rows])
    return submission_files(run.path, step, digest), digest.encode()


class TestExchangedFile:
    """Another file under the name of one that the manifest names."""

    @pytest.mark.parametrize("which", ["submission", "verdict"])
    def test_a_byte(self, run: Run, which: str) -> None:
        flip_a_byte(getattr(files_of(run), which))
        refused(run, f"the {which}'s digest is")

    @pytest.mark.parametrize("with_envelopes", [False, True])
    def test_another_accepted_submission(self, run: Run, with_envelopes: bool) -> None:
        other, files = another_submission(run)[0], files_of(run)
        files.submission.write_bytes(other.submission.read_bytes())
        files.verdict.write_bytes(other.verdict.read_bytes())
        if with_envelopes:
            files.submission_envelope.write_bytes(other.submission_envelope.read_bytes())
            files.verdict_envelope.write_bytes(other.verdict_envelope.read_bytes())
        refused(run, "digest" if with_envelopes else "the submission's digest")

    def test_the_verdict_of_another_submission(self, run: Run) -> None:
        other, files = another_submission(run)[0], files_of(run)
        files.verdict.write_bytes(other.verdict.read_bytes())
        files.verdict_envelope.write_bytes(other.verdict_envelope.read_bytes())
        refused(run, "the submission that the verdict is on")

    def test_a_file_beside_those_named_is_not_read(self, run: Run) -> None:
        other, alone = another_submission(run)[0], read(run)
        for path in (other.submission, other.verdict, other.verdict_envelope):
            path.write_bytes(b"a submission that crashes what reads it")
        again = read(run)
        assert [r.reward for r in again.rollouts] == [r.reward for r in alone.rollouts]

    def test_a_file_that_is_gone(self, run: Run) -> None:
        files_of(run).verdict.unlink()
        refused(run, "No such file")


class TestExchangedManifest:
    """Another manifest in the place of the step's: only the coordinator's word for it counts."""

    @pytest.mark.parametrize("who", ["worker", "validator"])
    def test_signed_by_another(self, run: Run, who: str) -> None:
        run.add_batch(0, named(run)[:1], key=getattr(run, who))
        refused(run, "may not sign")

    def test_of_another_step(self, run: Run) -> None:
        run.add_step(1, version=0)
        step_0, step_1 = (step_folder(run.path, step) / "batch.json" for step in (0, 1))
        step_1.write_bytes(step_0.read_bytes())
        refused(run, "step", step=1)

    def test_of_another_run(self, run: Run, tmp_path: Path) -> None:
        spec = tiny_spec(name="another")
        other = replace(run, path=tmp_path / "other", spec=spec)  # of the same keys
        other.add_step(0, version=0)
        place = Path("rollouts", "step_0", "batch.json")
        (run.path / place).write_bytes((other.path / place).read_bytes())
        refused(run, "run")

    def test_with_a_group_more(self, run: Run) -> None:
        path = step_folder(run.path, 0) / "batch.json"
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"group":3', b'"group":2'))
        assert path.read_bytes() != data
        refused(run, "signature does not match")

    def test_that_names_a_group_of_a_rejected_submission(self, run: Run) -> None:
        files, groups = files_of(run), named(run)
        run.file_verdict(0, groups[0].submission, files.verdict.read_bytes(), accepted=False)
        refused(run, "accepted")


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

    @pytest.mark.parametrize(
        "change",
        [
            lambda v: replace(v, reward=100.0, task_reward=100.0),
            lambda v: replace(v, logprobs=v.logprobs - 5),
        ],
        ids=["rewards", "log-probs"],
    )
    def test_a_verdict_written_anew(self, run: Run, change: Callable) -> None:
        files, submission = files_of(run), named(run)[0].submission
        table = encode_verdicts([change(v) for v in decode_verdicts(files.verdict.read_bytes())])
        signed = files.verdict_envelope.read_bytes()
        # when the table is exchanged, alone or with an envelope of whoever has a key
        files.verdict.write_bytes(table)
        refused(run, "the verdict's digest is")
        for key, words in (
            (run.worker, "may not sign"),
            (run.coordinator, "may not sign"),
            (run.validator, "the digest in the verdict's envelope"),  # even a validator's own
        ):
            run.file_verdict(0, submission, table, key=key)
            assert files.verdict_envelope.read_bytes() != signed
            refused(run, words)

    def test_a_submission_written_anew(self, run: Run) -> None:
        """Other tokens under the verdict of the old ones, signed by the worker again."""
        files = files_of(run)
        rows = decode_rollouts(files.submission.read_bytes(), max_rows=99, max_bytes=10**6)
        table = encode_rollouts(
            [replace(r, output_tokens=r.output_tokens[::-1].copy()) for r in rows]
        )
        assert digest_bytes(table) != named(run)[0].submission
        files.submission.write_bytes(table)
        files.submission_envelope.write_bytes(
            sign_submission(
                table, run=run.spec.name, step=0, index=0, lease="0" * 64, key=run.worker
            )
        )
        refused(run, "the digest in the submission's envelope")


class TestPoisonThatWasAccepted:
    """A validator, bribed or wrong, let a file through that is no table."""

    @pytest.mark.parametrize(
        ("file", "words"),
        [
            (lambda: encode_rollouts([])[:-1], r"\d+ bytes, its counts give"),
            (lambda: b"\xff" * 1000, "shorter than its header"),
            (lambda: encode_verdicts([]), "the header is not that of a runspec submission"),
            (lambda: b"PAR1" * 100, "a Parquet file of an older version"),
            (lambda: bytes(1 << 20), r"1048576 bytes, more than the \d+ allowed"),
        ],
        ids=["cut", "lying", "verdict", "older", "large"],
    )
    def test_the_learner_names_it_and_who_let_it_through(
        self, run: Run, file: Callable[[], bytes], words: str
    ) -> None:
        # given a submission that is poison, accepted and named by the signed manifest of step 0
        good = named(run)
        digest = run.accept(0, good, file())
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
