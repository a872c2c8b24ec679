"""`python -m verify calibrate` over a run directory: what is measured, derived, signed, refused."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from pathlib import Path

import pytest

from runspec.core.hashing import digest_file
from runspec.core.keys import SigningKey
from runspec.core.spec.schema import RunSpec
from tests.verify.calibration.file_engine import FileEngine, save_small_model
from tests.verify.calibration.honest_run import WORKER, HonestRun
from tests.verify.small_model import ParityTask, SmallModel, Worker, small_spec
from verify import plugins
from verify.__main__ import main
from verify.calibration import run
from verify.calibration.prefills import noise
from verify.profile import Profile, open_profile
from verify.thresholds import BFLOAT16

MODEL = SmallModel.random(seed=3)
SUBMISSIONS = 48


def honest_run(directory: Path, spec: RunSpec, versions: int, submissions: int) -> Path:
    """A run whose workers compute in bfloat16, 8 rollouts a submission."""
    run = HonestRun(directory, spec)
    for version in range(versions):
        model = MODEL if version == 0 else MODEL.perturbed(0.01, seed=version)
        save_small_model(model, run.weights(version))
        run.publish(version)
        worker = Worker(WORKER, model.in_bfloat16(), spec, ParityTask())
        for _ in range(submissions // versions):
            signed, lease = run.lease(version, groups=2)
            run.take(signed, lease, worker.rollouts(signed, lease))
    run.close()
    return directory


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    return honest_run(folder / "run", small_spec(dtype="bfloat16"), 2, SUBMISSIONS)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "root.key"
    SigningKey.generate().save(path)
    return path


@pytest.fixture(autouse=True)
def file_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, dist = "jax", None
        load = staticmethod(lambda: FileEngine)

    found = {plugins.PREFILL_GROUP: [Point]}
    monkeypatch.setattr(plugins, "entry_points", lambda group: found[group])


def calibrated(run_dir: Path, key: Path, *more: str) -> tuple[int, Path]:
    out = key.with_name("profile.json")
    words = ["calibrate", str(run_dir), "--pool", "home", "--key", str(key), "--out", str(out)]
    return main([*words, *more]), out


def opened(path: Path, key: Path) -> Profile:
    return open_profile(path.read_bytes(), root_public_key=SigningKey.load(key).public_hex)


def test_a_pool_is_measured_and_held_against_perturbed_weights(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given what the weights' files are
    weights = run_dir / "weights" / "v0" / "model.safetensors"
    before = digest_file(weights)
    # when the pool is calibrated, and held against perturbed weights
    monkeypatch.setattr(run, "PERTURBED_SUBMISSIONS", 6)
    perturbed = [("off by 1%", noise(0.01)), ("off by 4%", noise(0.04))]
    outcome = run.calibrate(run.Order(run_dir, "home", perturbed=perturbed), logging.getLogger())
    # then the profile says what of
    profile = outcome.profile
    assert (profile.sampler.precision, profile.validator.precision) == ("bfloat16", "float32")
    drawn = profile.sampler.sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k) == (0.8, 1.0, -1)
    assert profile.measured.submissions == SUBMISSIONS
    assert profile.measured.rollouts == 8 * SUBMISSIONS
    assert (profile.measured.oldest_version, profile.measured.newest_version) == (0, 1)
    assert profile.model.hidden_size == 64
    # and its limits are above all that was measured, tighter than published, looser nowhere
    limits, number = profile.as_limits(), profile.numbers["logprob_rollout"]
    assert number.samples == 8 * SUBMISSIONS
    assert number.quantiles["1"] < limits.logprob_rollout < BFLOAT16.logprob_rollout
    assert limits.logprob_submission < BFLOAT16.logprob_submission
    assert limits.gap == BFLOAT16.gap < limits.gap_max < BFLOAT16.gap_max
    assert limits.gap_noise is not None
    assert limits.gap_noise.largest_mean(30_000) < BFLOAT16.gap_mean
    assert limits.mismatch_share < BFLOAT16.mismatch_share
    assert profile.looser == []
    # and short chunks have limits of their own
    assert [row.below for row in limits.short] == [128, 256, 1024]
    assert limits.for_chunk(300) != limits.for_chunk(2000)
    # and the right weights pass, where others are told apart that passed the published limits
    right, off, far = outcome.power
    assert right.profile.rejected_submissions == 0
    assert (off.published.rejected_submissions, off.profile.rejected_submissions) == (0, 6)
    assert (far.published.named()["TOPLOC"], far.profile.named()["TOPLOC"]) == (0, 6)
    # and the run's own files are as they were
    assert digest_file(weights) == before


def test_an_unseeded_pool_has_no_gaps_to_measure(tmp_path: Path, key: Path) -> None:
    # given a trusted pool that cuts its distribution, and draws from it without a lease's noise
    sampling = {"temperature": 0.8, "seeded": False, "top_p": 0.9}
    spec = small_spec(dtype="bfloat16", trust="trusted", sampling=sampling)
    code, out = calibrated(honest_run(tmp_path / "run", spec, 1, 6), key)
    assert code == 0
    profile = opened(out, key)
    assert not profile.measured.seeded
    assert not [name for name in profile.numbers if name.startswith("gap")]
    assert profile.as_limits().gap_mean == BFLOAT16.gap_mean
    assert profile.as_limits().logprob_rollout < BFLOAT16.logprob_rollout


def test_a_root_elsewhere_signs_what_was_calibrated(
    run_dir: Path, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = calibrated(run_dir, key)
    assert code == 0
    root, signed = tmp_path / "other.key", tmp_path / "signed.json"
    SigningKey.generate().save(root)
    capsys.readouterr()
    assert main(["sign-profile", str(out), "--key", str(root), "--out", str(signed)]) == 0
    assert opened(signed, root) == opened(out, key)
    assert "logprob_rollout" in capsys.readouterr().out
    # and in no other place than where it may
    assert main(["sign-profile", str(out), "--key", str(root), "--out", str(tmp_path)]) == 1
    assert "no profile can be written here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--pool", "nobody"], "no pool 'nobody'"),
        (["--rate", "1e-9"], "are needed for a rate of 1e-09"),
        (["--weights", "/nowhere"], "whose weights are on this machine"),
    ],
)
def test_what_cannot_be_measured_is_said(
    run_dir: Path, key: Path, change: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = calibrated(run_dir, key, *change)
    assert code == 1
    assert words in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_it_finds_no_copies_of_weights(
    run_dir: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    # given a calibration that is at its first perturbed weights
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(
        "verify.calibration.prefills.perturb", lambda *_: os.kill(os.getpid(), number)
    )
    # when it is told to end
    code, out = calibrated(run_dir, key, "--perturbed")
    # then nothing is left of it
    assert (code, out.exists()) == (130, False)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_weights_that_are_not_those_published_are_refused(
    run_dir: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_dir / "weights" / "v1" / "config.json"
    text = config.read_text()
    config.write_text(text + " ")
    try:
        code, _ = calibrated(run_dir, key)
    finally:
        config.write_text(text)
    assert code == 1
    assert "other bytes than were published" in capsys.readouterr().err
