"""Profiles of calibrated limits: which are believed, which hold for a pool, and what they allow."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from runspec.cli.checks import sound_spec
from runspec.cli.plan import plan_command
from runspec.core.errors import UserError
from runspec.core.schema.load import SpecFiles
from tests.runspec.core.schema.spec_files import EXAMPLES, find
from tests.verify.profiles import ROOT, document, made_profile
from verify.profile import PairLimits
from verify.thresholds import FLOAT32

SPEC = f"""\
extends: [{EXAMPLES / "base.yaml"}]
identity: {{root_public_key: {ROOT.public_hex}}}
verify:
  profiles:
    - {{name: measured, file: profiles/measured.json}}
samplers:
  - name: pool
    sampling: {{temperature: 0.8}}
"""
STRICT = replace(FLOAT32, logprob_rollout=1e-4, logprob_submission=1e-4)
LOOSE = replace(FLOAT32, gap_mean=2 * FLOAT32.gap_mean)
SMALLER = {"hidden_size": 96, "num_hidden_layers": 2, "vocab_size": 192}


def spec_with(folder: Path, text: str | bytes) -> Path:
    """A spec beside the file of its profile."""
    (folder / "profiles").mkdir(exist_ok=True)
    data = text.encode() if isinstance(text, str) else text
    (folder / "profiles" / "measured.json").write_bytes(data)
    (folder / "spec.yaml").write_text(SPEC)
    return folder / "spec.yaml"


@pytest.mark.parametrize(
    ("text", "severity", "words"),
    [
        (document(made_profile()).replace("made-up", "made-it"), "error", "signature does not"),
        (document(made_profile(issued=0.0, expires=1.0)), "error", "expired"),
        (document(made_profile(issued=time.time() + 1e4)), "error", "in the future"),
        (b"\xff\xfe", "error", "invalid start byte"),
        (document(made_profile(sampler={"hardware": "h100-80g"})), "warning", "h100-80g, not cpu"),
        (document(made_profile(validator={"engine": "torch"})), "warning", "engine torch, not jax"),
        (document(made_profile(sampler={"precision": "bfloat16"})), "warning", "precision bf"),
        (document(made_profile(model=SMALLER)), "error", "hidden_size 96"),
        (document(made_profile(LOOSE, looser=["gap_mean"])), "error", "gap_mean above verify.loos"),
    ],
    ids=range(9),  # the texts are long
)
def test_what_does_not_hold_for_the_pool_is_found_at_the_profile(tmp_path, text, severity, words):
    (finding,) = find(spec_with(tmp_path, text))
    assert (finding.code, finding.severity) == ("calibration-profile", severity)
    assert (finding.line, finding.path) == (5, "verify.profiles.measured")
    assert words in finding.message and finding.suggestion


def test_a_signed_profile_is_clean_and_satisfies_the_rule_on_precisions(tmp_path):
    assert find(spec_with(tmp_path, document(made_profile()))) == []
    # given a pair of which nothing was published: float32 judged by bfloat16
    profile = made_profile(validator={"precision": "bfloat16"})
    path = spec_with(tmp_path, document(profile))
    assert find(path, "learner.compute_dtype=bfloat16") == []
    [found] = find(path, "learner.compute_dtype=bfloat16", "verify.profiles=[]")
    assert found.code == "uncalibrated-precision"


def test_the_resolved_spec_holds_the_profile_and_judges_by_it(tmp_path):
    # given a profile with limits of its own
    path = spec_with(tmp_path, document(made_profile(STRICT)))
    # when the spec is made whole, and the file is exchanged afterwards
    spec = sound_spec(SpecFiles(path))
    (tmp_path / "profiles" / "measured.json").write_text(document(made_profile()))
    # then it is the first that counts
    assert PairLimits(spec).of("pool").limits.logprob_rollout == 1e-4
    # and a document that was exchanged is refused
    (item,) = spec.verify.profiles
    assert item.document is not None
    forged = item.model_copy(update={"document": item.document.replace("made-up", "made-it")})
    verify = spec.verify.model_copy(update={"profiles": [forged]})
    with pytest.raises(UserError, match="signature does not match"):
        PairLimits(spec.model_copy(update={"verify": verify}))


def test_thresholds_of_the_spec_go_before_a_profile(tmp_path):
    given = (
        "{name: float32, logprob_submission: 0.01, logprob_rollout: 0.02, gap: 0.01, "
        "gap_share: 0.0, gap_max: 0.01, gap_mean: 1e-4, mismatch_share: 0.1, mantissa_mean: 2.0, "
        "mantissa_median: 2.0}"
    )
    path = spec_with(tmp_path, document(made_profile(STRICT)))
    spec = sound_spec(SpecFiles(path, overrides=[f"verify.thresholds=[{given}]"]))
    assert PairLimits(spec).of("pool").limits.logprob_rollout == 0.02


def test_the_plan_says_by_which_limits_pools_are_judged(tmp_path, capsys):
    path = spec_with(tmp_path, document(made_profile(expires=4e9)))
    for overrides, said in (
        ((), "pool: verify.profiles.measured, until 2096-10-02"),
        (("samplers.pool.dtype=bfloat16",), "pool: the published ones"),
    ):
        assert plan_command(path, overrides=list(overrides), runs_dir=tmp_path / "runs") == 0
        assert said in capsys.readouterr().out
