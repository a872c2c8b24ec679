"""A profile from outside: signed by the root, in date, in one form; and what is judged by it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, sign_document
from runspec.core.spec.resolved import MAX_PROFILE_BYTES
from runspec.core.spec.schema import CalibrationProfile, RunSpec
from tests.verify.bench import MODEL, Bench
from tests.verify.profiles import DAY_S, ROOT, document, made_profile, tampered
from tests.verify.small_model import Worker
from verify.coordinator.machine.gap_history import excess_of
from verify.pool_limits import (
    gap_noise_by_pool,
    limits_by_pool,
)
from verify.profile import open_profile
from verify.thresholds import BFLOAT16, FLOAT32, ChunkLimits, GapNoise, Limits

PROFILE = made_profile()
TABLE = PROFILE.limits.model_dump()
SHORT = {"mismatch_share": 0.1, "miss_share": 0.1, "mantissa_mean": None, "mantissa_median": 1.0}


def opened(data: bytes, now: float | None = None) -> object:
    return open_profile(data, root_public_key=ROOT.public_hex, now=now)


def with_profile(spec: RunSpec, text: str, root: str | None = ROOT.public_hex) -> RunSpec:
    item = CalibrationProfile(name="measured", document=text)
    return spec.model_copy(
        update={
            "verify": spec.verify.model_copy(update={"profiles": [item]}),
            "identity": spec.identity.model_copy(update={"root_public_key": root}),
        }
    )


def test_a_profile_opens_as_it_was_signed() -> None:
    limits = replace(BFLOAT16, short=(ChunkLimits(256, 0.2, 0.1, math.inf, 4.0),))
    profile = made_profile(limits, sampler={"precision": "bfloat16"})
    found = open_profile(document(profile).encode(), root_public_key=ROOT.public_hex)
    assert found == profile
    assert found.as_limits() == limits


@pytest.mark.parametrize(
    "payload",
    [
        {"version": 2},
        {"formula": "other/1"},
        {"rate": 0.0},
        {"more": 1},
        {"limits": {**TABLE, "gap": -1.0}},
        {"limits": {**TABLE, "gap": "0.1"}},
        {"limits": {**TABLE, "mismatch_share": 1.5}},
        {"limits": {**TABLE, "gap_mean": 1.0}},
        {"limits": {k: v for k, v in TABLE.items() if k != "gap"}},
        {"limits": {**TABLE, "short": [{"below": 256, **SHORT}, {"below": 128, **SHORT}]}},
        {"limits": {**TABLE, "short": [{"below": n + 1, **SHORT} for n in range(9)]}},
        {"limits": {**TABLE, "short": [{"below": 128, **SHORT, "mismatch_share": 0.5}]}},
        {"sampler": {"engine": "vllm", "precision": "int3", "hardware": "cpu"}},
        {"looser": ["x"] * 65},
        {"numbers": []},
    ],
)
def test_other_forms_are_refused_though_the_root_signed_them(payload: dict[str, Any]) -> None:
    with pytest.raises(BadSignature):
        opened(tampered(PROFILE, **payload))


@pytest.mark.parametrize(
    "data",
    [
        document(PROFILE, SigningKey.generate()).encode(),
        document(PROFILE).replace("0.005", "0.006").encode(),
        sign_document("roles", PROFILE.model_dump(mode="json"), ROOT),
        b" " * (MAX_PROFILE_BYTES + 1),
        b"",
    ],
    ids=["other key", "tampered", "other kind", "oversized", "empty"],
)
def test_what_the_root_did_not_sign_is_refused(data: bytes) -> None:
    with pytest.raises(BadSignature):
        opened(data)


def test_a_profile_holds_for_a_time() -> None:
    data = document(PROFILE).encode()
    opened(data, PROFILE.issued + DAY_S / 2)
    for now in (PROFILE.issued - 3600.0, PROFILE.expires + 3600.0):
        with pytest.raises(BadSignature, match=r"future|expired"):
            opened(data, now)


# --- in a run ------------------------------------------------------------------------------------


def judged(tmp_path: Path, limits: Limits, shift: float) -> str:
    """Why a submission is rejected whose weights are off by a share; empty where it is not."""
    bench = Bench(tmp_path, dtype="bfloat16")
    profile = made_profile(limits, sampler={"precision": "bfloat16"})
    bench.spec = with_profile(bench.spec, document(profile))
    model = MODEL.perturbed(shift) if shift else MODEL
    worker = Worker(bench.worker_key, model.in_bfloat16(), bench.spec, bench.task_set)
    return bench.verdict(bench.rollouts_of(worker)).reason


def test_a_validator_judges_by_the_profile(tmp_path: Path) -> None:
    # given what `calibrate` derived of this pair (test_calibrate.py), and weights off by 1 %
    measured = replace(BFLOAT16, logprob_submission=0.0145, logprob_rollout=0.0558)
    assert judged(tmp_path / "a", BFLOAT16, 0.01) == ""
    assert judged(tmp_path / "b", measured, 0.0) == ""
    assert judged(tmp_path / "c", measured, 0.01).startswith("logprobs_submission")


def test_a_profile_of_another_pool_leaves_the_published_limits(tmp_path: Path) -> None:
    spec = Bench(tmp_path).spec
    other = made_profile(replace(FLOAT32, gap_mean=1e-6), sampler={"hardware": "h100-80g"})
    assert limits_by_pool(with_profile(spec, document(other))) == {"home": FLOAT32}
    same = made_profile(replace(FLOAT32, gap_mean=1e-6))
    assert limits_by_pool(with_profile(spec, document(same)))["home"].gap_mean == 1e-6


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.2}, {"top_p": 0.9}, {"top_k": 20}],
    ids=lambda each: next(iter(each)),
)
def test_a_profile_of_other_sampling_leaves_the_published_limits(
    tmp_path: Path, change: dict[str, float]
) -> None:
    drawn = {"temperature": 0.8, "top_p": 1.0, "top_k": -1}
    profile = document(made_profile(replace(FLOAT32, gap_mean=1e-6), sampler={"sampling": drawn}))
    for sampling, gap_mean in ((drawn, 1e-6), ({**drawn, **change}, FLOAT32.gap_mean)):
        spec = Bench(tmp_path, sampling=sampling).spec
        assert limits_by_pool(with_profile(spec, profile))["home"].gap_mean == gap_mean


def test_of_gaps_a_seeded_pools_profile_says_nothing_to_one_that_draws_freely(
    tmp_path: Path,
) -> None:
    # given a profile of a seeded pool, and a pool of the same machines that is not seeded
    measured = replace(
        BFLOAT16,
        logprob_submission=0.0145,
        gap=0.2,
        gap_max=0.3,
        gap_noise=GapNoise(cap=0.02, mean=7e-5, probability=1e-6),
    )
    profile = made_profile(measured, sampler={"precision": "bfloat16"}, looser=["gap"])
    bench = Bench(
        tmp_path,
        dtype="bfloat16",
        trust="trusted",
        sampling={"temperature": 0.8, "seeded": False},
    )
    bench.spec = with_profile(bench.spec, document(profile))
    # then its log-probs and proofs are judged by the profile, and no gap is
    assert limits_by_pool(bench.spec) == {"home": replace(BFLOAT16, logprob_submission=0.0145)}
    # and the coordinator takes its verdicts, which cannot say what gaps come to
    verdict = bench.verdict(bench.honest())
    assert verdict.accepted, verdict.reason
    assert excess_of(verdict.rows, gap_noise_by_pool(bench.spec).get("home")) is None
