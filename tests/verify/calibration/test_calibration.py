"""`python -m verify calibrate`: a run is measured, limits derived from it, signed or refused."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bridge.safetensors_io import read_headers, read_tensor, write_safetensors
from bridge.tensors import dtype_named
from runspec.core.schema import RunSpec
from runspec.core.signed import SigningKey
from tests.verify.calibration.honest_run import WORKER, HonestRun
from tests.verify.profiles import made_profile
from tests.verify.small_model import (
    HIDDEN,
    VOCAB,
    NumpyEngine,
    ParityTask,
    SmallModel,
    Worker,
    small_spec,
)
from verify import plugins
from verify.__main__ import main
from verify.calibration import calibrate
from verify.calibration.derive import (
    FLOOR,
    MIN_SAMPLES,
    ROOM,
    derive,
    noise_of,
    samples_needed,
    tail_bound,
)
from verify.calibration.measure import Measurements
from verify.checks.prefill import judge_gaps
from verify.plugins import WeightsLocation
from verify.profile import Profile, looser_than_published, open_profile
from verify.thresholds import BFLOAT16, DRIFT, SUBMISSIONS, GapNoise

pytestmark = pytest.mark.slow

stats = pytest.importorskip("scipy.stats")
MODEL = SmallModel.random(seed=3)
RATE = 1e-6

# --- the command, over a run directory ----------------------------------------------------------

RUN_SUBMISSIONS = 48
SHAPES = {"embed": (VOCAB, HIDDEN), "mix": (HIDDEN, HIDDEN), "head": (HIDDEN, VOCAB)}
CONFIG = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "vocab_size": VOCAB}


class FileEngine(NumpyEngine):
    """See `verify.plugins.PrefillEngine`: asks nobody, as all versions lie in its cache."""

    def __init__(self, spec: RunSpec, weights: WeightsLocation) -> None:
        super().__init__({}, weights.cache_dir)

    def ensure_version(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        folder = self.directory / f"v{version}"
        headers = read_headers(folder)
        self.versions[version] = SmallModel(*(read_tensor(headers[name]) for name in SHAPES))
        return folder


def honest_run(directory: Path, spec: RunSpec, versions: int, submissions: int) -> Path:
    """A run whose workers compute in bfloat16, 8 rollouts a submission."""
    made = HonestRun(directory, spec)
    for version in range(versions):
        model = MODEL if version == 0 else MODEL.perturbed(0.01, seed=version)
        folder, tensors = made.weights(version), (getattr(model, name) for name in SHAPES)
        write_safetensors(folder / "model.safetensors", SHAPES, dtype_named("float32"), tensors)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        made.publish(version)
        worker = Worker(WORKER, model.in_bfloat16(), spec, ParityTask())
        for _ in range(submissions // versions):
            signed, lease = made.lease(version, groups=2)
            made.take(signed, lease, worker.rollouts(signed, lease))
    made.close()
    return directory


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    return honest_run(folder / "run", small_spec(dtype="bfloat16"), 2, RUN_SUBMISSIONS)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root's; and prefill engines are those of this module."""

    class Point:
        name, dist = "jax", None
        load = staticmethod(lambda: FileEngine)

    monkeypatch.setattr(plugins, "entry_points", lambda group: [Point])
    SigningKey.generate().save(tmp_path / "root.key")
    return tmp_path / "root.key"


def calibrated(run_dir: Path, key: Path, *more: str) -> tuple[int, Path]:
    out = key.with_name("profile.json")
    words = ["calibrate", str(run_dir), "--pool", "home", "--key", str(key), "--out", str(out)]
    return main([*words, *more]), out


def opened(path: Path, key: Path) -> Profile:
    return open_profile(path.read_bytes(), root_public_key=SigningKey.load(key).public_hex)


@pytest.mark.usefixtures("key")
def test_a_pool_is_measured_and_its_limits_are_tighter(run_dir: Path) -> None:
    profile = calibrate(run_dir, "home", log=logging.getLogger())
    # then the profile says what of
    assert (profile.sampler.precision, profile.validator.precision) == ("bfloat16", "float32")
    sampling = profile.sampler.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.8, 1.0, -1)
    measured = profile.measured
    assert (measured.submissions, measured.rollouts) == (RUN_SUBMISSIONS, 8 * RUN_SUBMISSIONS)
    assert (measured.oldest_version, measured.newest_version) == (0, 1)
    assert profile.model.hidden_size == 64
    # and its limits are above all that was measured, tighter than published, looser nowhere
    limits, number = profile.as_limits(), profile.numbers["logprob_rollout"]
    assert number.samples == 8 * RUN_SUBMISSIONS
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


def test_an_unseeded_pool_has_no_gaps_to_measure_and_a_root_elsewhere_signs_its_profile(
    tmp_path: Path, key: Path
) -> None:
    # given a trusted pool that cuts its distribution, and draws from it without a lease's noise
    sampling = {"temperature": 0.8, "seeded": False, "top_p": 0.9}
    spec = small_spec(dtype="bfloat16", trust="trusted", sampling=sampling)
    code, out = calibrated(honest_run(tmp_path / "run", spec, 1, 6), key)
    profile = opened(out, key)
    assert code == 0 and not profile.measured.seeded
    assert not [name for name in profile.numbers if name.startswith("gap")]
    limits = profile.as_limits()
    assert (limits.gap_share, limits.gap_max) == (BFLOAT16.gap_share, BFLOAT16.gap_max)
    assert (limits.gap_mean, limits.gap_noise) == (BFLOAT16.gap_mean, None)
    assert limits.logprob_rollout < BFLOAT16.logprob_rollout
    # and a root elsewhere signs what was calibrated
    root, signed = tmp_path / "other.key", tmp_path / "signed.json"
    SigningKey.generate().save(root)
    assert main(["sign-profile", str(out), "--key", str(root), "--out", str(signed)]) == 0
    assert opened(signed, root) == profile


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--pool", "nobody"], "no pool 'nobody'"),
        (["--rate", "1e-9"], "are needed for a rate of 1e-09"),
        (["--weights", "/nowhere"], "whose weights are on this machine"),
        ([], "other bytes than were published"),
    ],
)
def test_what_cannot_be_measured_is_said(
    run_dir: Path, key: Path, change: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_dir / "weights" / "v1" / "config.json"
    text = config.read_text()
    config.write_text(text if change else text + " ")
    try:
        code, out = calibrated(run_dir, key, *change)
    finally:
        config.write_text(text)
    assert code == 1 and words in capsys.readouterr().err
    assert not out.exists()


# --- from measurements to limits ----------------------------------------------------------------

ROLLOUTS = 400


def rounding(
    rollouts: int, *, tokens: int = 300, share: float = 0.004, seed: int = 0
) -> list[np.ndarray]:
    """Gaps as bfloat16 has them: few, and most of them small."""
    rng = np.random.default_rng(seed)
    return [
        (rng.exponential(0.015, tokens) * (rng.random(tokens) < share)).astype(np.float32)
        for _ in range(rollouts)
    ]


def measured(scale: float = 1.0, **values: np.ndarray) -> Measurements:
    """Numbers as bfloat16 has them, times a scale; keyword arguments take their place."""
    rng = np.random.default_rng(0)
    found = {
        "logprob_submission": rng.normal(0.006, 0.0003, 60) * scale,
        "logprob_rollout": rng.normal(0.006, 0.001, ROLLOUTS) * scale,
        "gap": rng.exponential(0.002, ROLLOUTS) * scale,
        "gap_max": rng.exponential(0.002, ROLLOUTS) * scale,
        "mismatch_share": np.minimum(rng.poisson(2, ROLLOUTS) * scale, 128) / 128,
        "miss_share 8": np.minimum(rng.poisson(2, ROLLOUTS) * scale, 128) / 128,
        "miss_share 32": np.minimum(rng.poisson(1, ROLLOUTS) * scale, 128) / 128,
        "mantissa_mean": rng.normal(2.0, 0.2, ROLLOUTS) * scale,
        "mantissa_median": rng.poisson(0.3, ROLLOUTS) * scale,
        **values,
    }
    rows = {key: each.tolist() for key, each in found.items()}
    gaps = [gaps * np.float32(scale) for gaps in rounding(ROLLOUTS)]
    return Measurements(defaultdict(list, rows), gaps, submissions=60, rollouts=ROLLOUTS)


def test_a_quiet_pool_gets_tighter_limits() -> None:
    derived = derive(measured(), BFLOAT16, rate=RATE, allow_looser=False)
    limits, looser = derived.limits, derived.looser
    assert looser == [] == looser_than_published(limits, BFLOAT16)
    for name in ("logprob_submission", "logprob_rollout", "mismatch_share"):
        assert getattr(limits, name) < getattr(BFLOAT16, name), name
    # tau is more than a gap: it stays, and tails have their exceptions
    assert (limits.gap, limits.gap_share) == (0.1, 0.01)
    assert limits.gap_max == pytest.approx(0.3)
    assert limits.constant_ratio == BFLOAT16.constant_ratio
    # and of many tokens a tenth of the published mean gap is left, of a few it is the published
    assert limits.gap_mean == BFLOAT16.gap_mean and limits.gap_noise is not None
    assert limits.gap_noise.largest_mean(30_000) < 0.2 * BFLOAT16.gap_mean
    assert limits.gap_noise.largest_mean(300) > BFLOAT16.gap_mean
    # and one gap that no rollout had rejects nobody, as 6 of a million were; a larger one, or four
    gaps = np.zeros(300, np.float32)
    gaps[7] = 0.2035
    assert judge_gaps(gaps, limits).passed
    gaps[7] = 0.31
    assert not judge_gaps(gaps, limits).passed
    gaps[:8] = [0.2] * 4 + [0.0] * 4
    assert not judge_gaps(gaps, limits).passed
    # and of one without any rounding none undercuts the floor
    limits = derive(measured(1e-6), BFLOAT16, rate=RATE, allow_looser=False).limits
    assert (limits.logprob_rollout, limits.mantissa_mean) == (
        *(FLOOR.logprob_rollout, FLOOR.mantissa_mean),
    )
    assert limits.mismatch_share >= FLOOR.mismatch_share


def test_a_noisy_pool_keeps_the_published_limits_unless_told_otherwise() -> None:
    noisy = measured(8.0, mantissa_median=np.random.default_rng(6).poisson(0.3, ROLLOUTS))
    derived = derive(noisy, BFLOAT16, rate=RATE, allow_looser=False)
    limits = derived.limits
    assert derived.looser == [] == looser_than_published(limits, BFLOAT16)
    assert limits.logprob_rollout == BFLOAT16.logprob_rollout
    # when looser ones are allowed
    derived = derive(noisy, BFLOAT16, rate=RATE, allow_looser=True)
    assert "logprob_rollout" in derived.looser
    assert set(looser_than_published(derived.limits, BFLOAT16)) <= set(derived.looser)
    assert derived.limits.logprob_rollout > max(noisy.values["logprob_rollout"])
    # and a profile cannot hide that it is looser
    profile = made_profile(sampler={"precision": "bfloat16"})
    loose = profile.limits.model_copy(update={"gap_mean": 1.0})
    hidden = profile.model_copy(update={"limits": loose})
    assert looser_than_published(hidden.as_limits(), BFLOAT16) == ["gap_mean"]


def test_a_profile_says_the_limit_that_is_judged_by() -> None:
    # given too few submissions for a bound of their own, and misses whose bound is above that of
    # mismatches
    rng = np.random.default_rng(7)
    found = measured(
        logprob_submission=np.full(8, 0.006),
        mismatch_share=rng.binomial(128, 0.005, ROLLOUTS) / 128,
        **{"miss_share 8": rng.binomial(128, 0.01, ROLLOUTS) / 128},
    )
    derived = derive(found, BFLOAT16, rate=RATE, allow_looser=False)
    limits, numbers = derived.limits, derived.numbers
    # then what rollouts and mismatches may have is their limit, and the profile says so
    assert limits.logprob_submission == limits.logprob_rollout < BFLOAT16.logprob_submission
    assert limits.miss_share == limits.mismatch_share < numbers["miss_share"].bound
    for name in ("logprob_submission", "miss_share"):
        assert numbers[name].limit == getattr(limits, name)


# --- the mean of honest gaps --------------------------------------------------------------------


def noise_in(gaps: list[np.ndarray]) -> GapNoise:
    return noise_of(gaps, tau=0.1, least=1e-6, probability=1e-6)


def test_groups_that_differ_count_as_groups_and_keep_their_budget() -> None:
    # given the same gaps, spread over all groups or all in every twentieth
    even = rounding(400)
    uneven = [each * (number % 20 == 0) for number, each in enumerate(rounding(400, share=0.08))]
    assert noise_in(uneven).mean > 1.2 * noise_in(even).mean
    # given prompts of which few have ten times the gaps of the others, in long outputs
    calm = rounding(400, tokens=2000)
    hard = rounding(8, tokens=20_000, share=0.04, seed=1)
    found = noise_in(calm + hard)
    # then none of them is rejected by itself, as one would be by the mean of all
    means = [found.counted(each) / len(each) for each in hard]
    assert max(means) <= found.largest_mean(20_000)
    of_all = sum(map(found.counted, calm + hard)) / sum(map(len, calm + hard))
    assert max(means) > replace(found, mean=ROOM * of_all).largest_mean(20_000)


CAP, MEAN = 0.02, 5e-5


@pytest.mark.parametrize("probability", [0.1, 1e-3, 1e-6])
@pytest.mark.parametrize("tokens", [50, 1000, 30_000, 2_000_000])
def test_a_submission_of_the_widest_gaps_keeps_its_budget(tokens: int, probability: float) -> None:
    # given gaps of 0 or the cap alone, which spread most of all with a mean
    largest = GapNoise(CAP, MEAN, probability).largest_mean(tokens)
    # then the exact chance of more is at most the one stated
    gaps = np.floor(largest * tokens / CAP + 1e-9)
    assert stats.binom.sf(gaps, tokens, MEAN / CAP) <= probability
    # and no more than a few standard deviations are given away
    exact = stats.binom.isf(probability, tokens, MEAN / CAP)
    assert gaps <= exact + 2 + np.sqrt(exact)


def largest_sums(mean: float, *, workers: int, submissions: int) -> np.ndarray:
    """f64 [workers]: the largest that a worker's sum of excesses came to, of gaps 0 or the cap."""
    rng, tokens = np.random.default_rng(0), 3000
    total, most = np.zeros(workers), np.zeros(workers)
    for _ in range(submissions):
        counted = CAP * rng.binomial(tokens, mean / CAP, workers)
        total = np.maximum(0.0, total + counted - DRIFT * MEAN * tokens)
        most = np.maximum(most, total)
    return most


def test_honest_workers_are_seldom_alarmed_at_and_one_of_twice_the_mean_in_time() -> None:
    # given honest workers with 500 submissions each, and a chance that can be counted
    workers, submissions, chance = 4000, 500, 0.2
    most = largest_sums(MEAN, workers=workers, submissions=submissions)
    limit = GapNoise(CAP, MEAN, chance).largest_excess
    expected = workers * chance * submissions / SUBMISSIONS
    assert (most > limit).sum() <= expected + 4 * np.sqrt(expected)
    # and the chance is no idle one: a twentieth of the limit is exceeded by many
    assert (most > limit / 20).mean() > 0.5
    # given as many tokens as the excess of twice the mean takes to reach the limit, twice
    one = GapNoise(CAP, MEAN, 1e-6)
    needed = int(2 * one.largest_excess / ((2 - DRIFT) * MEAN) / 3000)
    most = largest_sums(2 * MEAN, workers=500, submissions=needed)
    assert (most > one.largest_excess).mean() > 0.99
    # while in each of its submissions it passes
    assert one.largest_mean(3000) > 3 * MEAN


# --- bounds of tails ----------------------------------------------------------------------------

Draw = Callable[[np.random.Generator, int], np.ndarray]
TAILS: dict[str, tuple[Draw, Callable[[float], float], float | None]] = {
    "gamma": (lambda g, n: g.gamma(3.0, size=n), lambda x: stats.gamma.sf(x, 3.0), None),
    "mostly zero": (
        lambda g, n: np.where(g.random(n) < 0.2, g.exponential(size=n), 0.0),
        lambda x: 0.2 * stats.expon.sf(x),
        None,
    ),
    "geometric": (lambda g, n: g.geometric(0.4, size=n) - 1, lambda x: 0.6 ** (x + 1), 1.0),
    "rare": (lambda g, n: g.poisson(0.05, size=n), lambda x: stats.poisson.sf(x, 0.05), 1.0),
}


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("n", [60, 1000])
def test_the_bound_of_a_tail_holds_on_fresh_draws(name: str, n: int) -> None:
    # given many calibrations of a known distribution
    draw, above, unit = TAILS[name]
    rng = np.random.default_rng(len(name))
    found = [tail_bound(draw(rng, n).astype(float), RATE, unit=unit).value for _ in range(60)]
    bounds = [value for value in found if value is not None]
    assert len(bounds) > 40
    # then a fresh draw exceeds a bound no more often than was asked for, on average, and nearly
    # all of the bounds keep the rate by themselves
    rates = np.array([above(bound) for bound in bounds])
    assert rates.mean() <= RATE and np.quantile(rates, 0.9) <= RATE
    # and they are no further out than twice where the rate is met
    points = np.linspace(0.0, 60.0, 1201)
    met = points[[above(x) >= RATE for x in points]].max()
    assert np.median(bounds) < 2.2 * met + 3.0


def test_heavy_tails_have_no_bound() -> None:
    rng = np.random.default_rng(0)
    found = [tail_bound(rng.pareto(1.0, 2000), RATE) for _ in range(20)]
    assert sum(each.value is None for each in found) > 15
    assert "heavier tail" in found[0].why


def test_too_few_samples_or_values_have_no_bound() -> None:
    values = np.random.default_rng(2).exponential(size=MIN_SAMPLES)
    assert tail_bound(values, RATE).value is not None
    found = tail_bound(values[1:], RATE)
    assert (found.value, found.why) == (None, f"{MIN_SAMPLES - 1} samples, {MIN_SAMPLES} needed")
    # and a rarer rate needs more of them
    assert samples_needed(1e-9) > 800 and tail_bound(values, 1e-9).value is None
    # given mantissa errors of which one in 128 is the only one above 0
    found = tail_bound(np.repeat([0.0, 1 / 128], [470, 30]), RATE)
    assert (found.value, found.why) == (None, "the 21 largest of 500 are all alike")
