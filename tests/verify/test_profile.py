"""A profile of calibrated limits: signed by the root, in date, in one form; and judged by."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runspec.core.errors import UserError
from runspec.core.schema.load import MAX_PROFILE_BYTES
from runspec.core.signed import BadSignature, SigningKey, sign_document
from tests.verify.bench import MODEL, Bench
from tests.verify.profiles import DAY_S, ROOT, document, made_profile, with_profile
from tests.verify.small_model import Worker, small_spec
from verify.coordinator.machine.verdicts import excess_of
from verify.profile import (
    KIND,
    PairLimits,
    Profile,
    open_profile,
    require_model,
    require_profiles,
)
from verify.thresholds import BFLOAT16, DRIFT, FLOAT32, ChunkLimits, GapNoise

PROFILE = made_profile()
TABLE = PROFILE.limits.model_dump()
SHORT = {"mismatch_share": 0.1, "miss_share": 0.1, "mantissa_mean": None, "mantissa_median": 1.0}
NOISE = GapNoise(cap=0.5, mean=1e-3, probability=1e-6)


def opened(data: bytes, now: float | None = None) -> Profile:
    return open_profile(data, root_public_key=ROOT.public_hex, now=now)


def test_a_profile_opens_as_it_was_signed_and_holds_for_a_time() -> None:
    limits = replace(BFLOAT16, short=(ChunkLimits(256, 0.2, 0.1, math.inf, 4.0),))
    profile = made_profile(limits, sampler={"precision": "bfloat16"})
    data = document(profile).encode()
    assert opened(data) == opened(data, profile.issued + DAY_S / 2) == profile
    assert opened(data).as_limits() == limits
    for now, words in ((profile.issued - 3600.0, "future"), (profile.expires + 3600.0, "expired")):
        with pytest.raises(BadSignature, match=words):
            opened(data, now)


@pytest.mark.parametrize(
    "payload",
    [
        {"formula": "other/1"},
        {"more": 1},
        {"limits": {**TABLE, "gap": -1.0}},
        {"limits": {**TABLE, "mismatch_share": 1.5}},
        {"limits": {**TABLE, "gap_mean": 1.0}},
        {"limits": {k: v for k, v in TABLE.items() if k != "gap"}},
        {"limits": {**TABLE, "short": [{"below": 256, **SHORT}, {"below": 128, **SHORT}]}},
        {"limits": {**TABLE, "short": [{"below": n + 1, **SHORT} for n in range(9)]}},
        {"limits": {**TABLE, "short": [{"below": 128, **SHORT, "mismatch_share": 0.5}]}},
        {"sampler": {"engine": "vllm", "precision": "int3", "hardware": "cpu"}},
    ],
)
def test_other_forms_are_refused_though_the_root_signed_them(payload: dict[str, Any]) -> None:
    with pytest.raises(BadSignature):
        opened(sign_document(KIND, {**PROFILE.model_dump(mode="json"), **payload}, ROOT))


@pytest.mark.parametrize(
    "data",
    [
        document(PROFILE, SigningKey.generate()).encode(),
        document(PROFILE).replace("0.005", "0.006").encode(),
        b" " * (MAX_PROFILE_BYTES + 1),
    ],
    ids=["other key", "tampered", "oversized"],
)
def test_what_the_root_did_not_sign_is_refused(data: bytes) -> None:
    with pytest.raises(BadSignature):
        opened(data)
    with pytest.raises(UserError, match=r"cannot be verified") as raised:
        PairLimits(with_profile(small_spec(), data.decode()))
    assert raised.value.place == "verify.profiles.measured"


def test_a_validator_starts_with_profiles_of_its_root_and_model_alone() -> None:
    spec = with_profile(small_spec(), document(PROFILE))
    config = PROFILE.model.model_dump()
    require_profiles(spec, root_public_key=ROOT.public_hex)
    require_model(spec, config)
    require_profiles(small_spec(), root_public_key="ab" * 32)  # a run without profiles
    with pytest.raises(UserError, match="is pinned"):
        require_profiles(spec, root_public_key="ab" * 32)
    for name in config:
        with pytest.raises(UserError, match=f"measured on a model with {name} "):
            require_model(spec, {**config, name: 1})
    unpinned = spec.identity.model_copy(update={"root_public_key": None})
    with pytest.raises(UserError, match="lacks identity"):
        PairLimits(spec.model_copy(update={"identity": unpinned}))


# --- in a run -----------------------------------------------------------------------------------


def bench_of(tmp_path: Path, profile: Profile, shift: float = 0.0, **pool: object) -> Bench:
    """A run with a profile, and a worker whose weights are off by a share."""
    bench = Bench(tmp_path, **pool)
    bench.spec = with_profile(bench.spec, document(profile), loosest=2.0)
    model = MODEL.perturbed(shift) if shift else MODEL
    if bench.spec.samplers[0].dtype == "bfloat16":
        model = model.in_bfloat16()
    bench.worker = Worker(bench.worker_key, model, bench.spec, bench.task_set)
    return bench


def test_a_validator_judges_by_the_profile(tmp_path: Path) -> None:
    # given what `calibrate` derived of this pair (test_calibration.py), and weights off by 1 %
    measured = replace(BFLOAT16, logprob_submission=0.0145, logprob_rollout=0.0558)
    for number, (limits, shift, reason) in enumerate(
        [(BFLOAT16, 0.01, ""), (measured, 0.0, ""), (measured, 0.01, "logprobs_submission")]
    ):
        folder = tmp_path / str(number)
        profile = made_profile(limits, sampler={"precision": "bfloat16"})
        bench = bench_of(folder, profile, shift, dtype="bfloat16")
        assert bench.verdict(bench.honest()).reason.partition(":")[0] == reason


def test_verdicts_on_a_calibrated_pool_say_what_gaps_come_to(tmp_path: Path) -> None:
    profile = made_profile(replace(FLOAT32, gap_noise=NOISE))
    bench = bench_of(tmp_path / "honest", profile)
    honest = bench.verdict(bench.honest()).rows
    allowed = [DRIFT * NOISE.mean * row.length for row in honest]
    assert [row.gap_excess for row in honest] == pytest.approx([-each for each in allowed])
    # and those of perturbed weights are above what is allowed for ever
    bench = bench_of(tmp_path / "other", profile, 0.02)
    other = bench.verdict(bench.honest()).rows
    excess = excess_of(other, NOISE)
    assert excess is not None
    assert excess > -DRIFT * NOISE.mean * sum(row.length for row in other)


@pytest.mark.parametrize(
    ("sampler", "sampling", "covers"),
    [
        ({}, {}, True),
        ({"hardware": "h100-80g"}, {}, False),
        *(({}, other, False) for other in ({"temperature": 0.2}, {"top_p": 0.9}, {"top_k": 20})),
    ],
)
def test_a_profile_of_another_pool_leaves_the_published_limits(
    sampler: dict[str, str], sampling: dict[str, object], covers: bool
) -> None:
    measured = replace(FLOAT32, gap_mean=1e-6)
    spec = small_spec(sampling={"temperature": 0.8, "top_p": 1.0, "top_k": -1, **sampling})
    found = PairLimits(with_profile(spec, document(made_profile(measured, sampler=sampler))))
    assert found.of("home").limits == (measured if covers else FLOAT32)


def test_limits_belong_to_a_pool_with_devices() -> None:
    # given a profile of the pool's own devices, and one of a kind that divides the model by two
    own, other = replace(FLOAT32, gap_mean=1e-6), replace(FLOAT32, gap_mean=2e-6)
    elsewhere = made_profile(other, sampler={"hardware": "cpu-b", "tensor": 2})
    texts = document(made_profile(own)), document(elsewhere)
    found = PairLimits(with_profile(small_spec(), *texts))
    # then each has its own limits, and a pair that nobody measured the published ones
    assert found.measured("home") == ["cpu-b x 2"]
    assert [found.of("home", each).limits for each in ("", "cpu-b x 2")] == [own, other]
    assert not (found.of("home").probation or found.of("home", "cpu-b x 2").probation)
    for unknown in ("cpu-b x 1", "cpu-c x 2"):
        assert (found.of("home", unknown).limits, found.of("home", unknown).probation) == (
            FLOAT32,
            True,
        )
    # and its work trains where the operator says so, or has calibrated nothing
    for spec in (with_profile(small_spec(), *texts, uncalibrated="train"), small_spec()):
        assert not PairLimits(spec).of("home", "cpu-c x 2").probation


def test_no_profile_is_looser_than_the_spec_allows() -> None:
    text = document(
        made_profile(replace(FLOAT32, gap_mean=1.5 * FLOAT32.gap_mean), looser=["gap_mean"])
    )
    assert PairLimits(with_profile(small_spec(), text, loosest=1.5)).of("home").limits != FLOAT32
    with pytest.raises(UserError, match=r"gap_mean of its limits are above 1.4 times") as raised:
        PairLimits(with_profile(small_spec(), text, loosest=1.4))
    assert "raise verify.loosest" in str(raised.value.remedy)


def test_of_gaps_a_seeded_pools_profile_says_nothing_to_one_that_draws_freely(
    tmp_path: Path,
) -> None:
    # given a profile of a seeded pool, and a pool of the same machines that is not seeded
    measured = replace(BFLOAT16, logprob_submission=0.0145, gap=0.2, gap_max=0.3, gap_noise=NOISE)
    profile = made_profile(measured, sampler={"precision": "bfloat16"}, looser=["gap"])
    free = {"trust": "trusted", "sampling": {"temperature": 0.8, "seeded": False}}
    bench = bench_of(tmp_path, profile, dtype="bfloat16", **free)
    # then its log-probs and proofs are judged by the profile, and no gap is
    found = PairLimits(bench.spec).of("home").limits
    assert found == replace(BFLOAT16, logprob_submission=0.0145)
    # and the coordinator takes its verdicts, which cannot say what gaps come to
    assert found.gap_noise is None
    assert bench.verdict(bench.honest()).accepted
